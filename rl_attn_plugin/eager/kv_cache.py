"""Writing new keys and values into a paged cache in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Store token t at slot ``slot_mapping[t] = page * page_size + offset``; -1 is skipped.

    Args:
        k: ``[T, Hkv, D]``.
        v: ``[T, Hkv, Dv]``.
        k_cache: ``[num_pages, page_size, Hkv, D]``, any strides, written in place.
        v_cache: as ``k_cache``.
        slot_mapping: int32 or int64 ``[T]``.
        k_scale: scalar or ``[Hkv]``: stored = value / scale.
        v_scale: as ``k_scale``.
    """
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[kept].long()
    size = k_cache.shape[1]
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        stored = new[kept]
        if scale is not None:
            stored = stored.float() / scale.float().reshape(-1, 1)
        if cache.dtype == torch.float8_e4m3fn:  # saturate: the cast itself overflows to NaN
            limit = torch.finfo(cache.dtype).max
            stored = stored.float().clamp(-limit, limit)
        cache[slots // size, slots % size] = stored.to(cache.dtype)

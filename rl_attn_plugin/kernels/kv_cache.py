"""Writing new keys and values into the pages of a cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rl_attn_plugin.kernels import schedule
from rl_attn_plugin.kernels.launch import launch
from rl_attn_plugin.kernels.tiles import INDEX_TENSORS, UPCAST


@triton.jit
def _round_to_e4m3(x):
    """Round to a value that e4m3 holds. Only for the interpreter, whose cast loses a carry into the exponent."""
    size = tl.maximum(tl.abs(x), 0.015625)  # below the least normal number the grid is even
    power = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = power * 1572864.0  # 1.5 * 2^23 units in the last of three fraction bits
    return (x + magic) - magic


@triton.jit
def _store(
    X, Cache, Scale, token, page, place, head, x_t, x_h, x_d, cache_p, cache_t, cache_h, cache_d, scale_h,
    DIM: tl.constexpr, BLOCK: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    x = tl.load(X + token * x_t + head * x_h + d * x_d, mask=d < DIM, other=0.0)
    if UPCAST or Scale is not None or E4M3:
        x = x.to(tl.float32)
    if Scale is not None:
        x = tl.div_rn(x, tl.load(Scale + head * scale_h).to(tl.float32))
    if E4M3:  # saturate: what is out of range becomes NaN otherwise
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -448.0), 448.0), x)
        if UPCAST:
            x = _round_to_e4m3(x)
    target = Cache + page * cache_p + place * cache_t + head * cache_h + d * cache_d
    tl.store(target, x.to(Cache.dtype.element_ty), mask=d < DIM)


@triton.jit(do_not_specialize_on_alignment=INDEX_TENSORS)
def write_kernel(
    K, V, KCache, VCache, KScale, VScale, Slots,
    k_t, k_h, k_d, v_t, v_h, v_d, kc_p, kc_t, kc_h, kc_d, vc_p, vc_t, vc_h, vc_d, slots_t, k_scale_h, v_scale_h,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr,
    E4M3: tl.constexpr,
):  # fmt: skip
    """Key and value of one token and kv head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(Slots + token * slots_t).to(tl.int64)
    if slot < 0:
        return
    page = slot // PAGE
    place = slot % PAGE
    _store(
        K, KCache, KScale, token, page, place, head, k_t, k_h, k_d, kc_p, kc_t, kc_h, kc_d, k_scale_h,
        D, BLOCK_D, E4M3,
    )  # fmt: skip
    _store(
        V, VCache, VScale, token, page, place, head, v_t, v_h, v_d, vc_p, vc_t, vc_h, vc_d, v_scale_h,
        DV, BLOCK_DV, E4M3,
    )  # fmt: skip


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
    """Store token t at slot ``slot_mapping[t] = page * page_size + offset``, in place; -1 is skipped.

    Args:
        k: ``[T, Hkv, D]``, any strides.
        v: ``[T, Hkv, Dv]``.
        k_cache: ``[num_pages, page_size, Hkv, D]``, any strides.
        v_cache: as ``k_cache``.
        slot_mapping: int32 or int64 ``[T]``.
        k_scale: scalar or ``[Hkv]``: stored = value / scale, saturating in e4m3.
        v_scale: as ``k_scale``.
    """
    tokens, heads, dim = k.shape
    v_dim = v.shape[2]
    if tokens == 0:
        return
    arguments = {
        "K": k, "V": v, "KCache": k_cache, "VCache": v_cache, "KScale": k_scale, "VScale": v_scale,
        "Slots": slot_mapping, "slots_t": slot_mapping.stride(0),
        **dict(zip(("k_t", "k_h", "k_d"), k.stride(), strict=True)),
        **dict(zip(("v_t", "v_h", "v_d"), v.stride(), strict=True)),
        **dict(zip(("kc_p", "kc_t", "kc_h", "kc_d"), k_cache.stride(), strict=True)),
        **dict(zip(("vc_p", "vc_t", "vc_h", "vc_d"), v_cache.stride(), strict=True)),
        "k_scale_h": _head_stride(k_scale), "v_scale_h": _head_stride(v_scale), "D": dim, "DV": v_dim,
        "BLOCK_D": schedule.padded(dim), "BLOCK_DV": schedule.padded(v_dim), "PAGE": k_cache.shape[1],
        "E4M3": k_cache.dtype.itemsize == 1,
    }  # fmt: skip
    launch(write_kernel, (tokens, heads), arguments, warps=1, stages=1)


def _head_stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(-1)

"""The attention function that transformers' layers call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.integrations.transformers.masks import COLUMNS, reach_of
from rl_attn_plugin.integrations.transformers.paged import PagedCache
from rl_attn_plugin.ops.attention import flash_attention, flash_attention_varlen

NAME = "rl_attn"


def rl_attn_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    paged_cache: PagedCache | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, chosen by what came with it: paged, packed, padded or plain.

    Args:
        module: the layer; its ``is_causal`` counts unless ``is_causal`` is given.
        query: ``[B, Hq, Sq, D]``.
        key: ``[B, Hkv, Sk, D]``.
        value: ``[B, Hkv, Sk, Dv]``.
        attention_mask: as `rl_attn_plugin.integrations.transformers.masks.rl_attn_mask` makes it.
        scaling: multiplies the scores.
        dropout: must be 0.
        sliding_window: W keys, the query's own included.
        softcap: of the scores.
        is_causal: see ``module``.
        s_aux: ``[Hq]`` sinks.
        position_ids: ``[B, S]``; a jump that is not +1 starts a new packed sequence.
        cu_seq_lens_q: int32 offsets of packed sequences, instead of looking for jumps.
        cu_seq_lens_k: the same for keys.
        max_length_q: host bound that goes with the offsets.
        max_length_k: the same for keys.
        paged_cache: set by `paged_forward`.
        position_bias: must be None.

    Returns:
        ``[B, Sq, Hq, Dv]`` and None (attention weights are never materialised).

    Raises:
        NotImplementedError: for dropout, a position bias or a mask matrix.
    """
    if dropout:
        raise NotImplementedError(
            f"attn_implementation='rl_attn' has no dropout, got {dropout}: set attention_dropout to 0"
        )
    if position_bias is not None:
        raise NotImplementedError(
            f"attn_implementation='rl_attn' adds no position bias, which {type(module).__name__} needs: "
            "use attn_implementation='sdpa'"
        )
    ours = attention_mask is not None and _is_ours(attention_mask)
    if sliding_window is not None:
        reach = sliding_window - 1
    else:  # some models put their window into the mask alone
        found = reach_of(attention_mask) if ours and attention_mask is not None else None
        reach = -1 if found is None else found
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {
        "causal": causal,
        "scale": scaling,
        "window": (reach, -1 if causal else reach),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    if torch.is_autocast_enabled(
        query.device.type
    ):  # as sdpa does: norms and rotations may have promoted q and k
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if paged_cache is not None:
        layer: int = module.layer_idx  # type: ignore[assignment]
        return paged_cache.attend(layer, q, options), None
    if cu_seq_lens_q is not None:
        return _packed(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, options), None
    if attention_mask is None or (ours and attention_mask.shape[-1] == 0):
        offsets = _packed_offsets(position_ids, q, k)
        if offsets is not None:
            return _packed(q, k, v, offsets, offsets, q.shape[1], q.shape[1], options), None
        return flash_attention(q, k, v, **options).out, None
    if ours and attention_mask.dtype == torch.int32:
        return _padded(q, k, v, attention_mask[:, 0, 0], options), None
    if ours or (attention_mask.dtype == torch.bool and attention_mask.shape[1:3] == (1, 1)):
        keep = attention_mask[:, 0, 0].bool()
        k, v = k[:, : keep.shape[1]], v[:, : keep.shape[1]]
        return flash_attention(q, k, v, key_padding_mask=keep, **options).out, None
    raise NotImplementedError(
        "attn_implementation='rl_attn' takes a 2-D padding mask or none, got a prepared mask of shape "
        f"{list(attention_mask.shape)} and dtype {attention_mask.dtype}"
    )


def _is_ours(mask: Tensor) -> bool:
    """Whether `rl_attn_mask` made it: nobody else's masks are of these types."""
    if mask.dim() != 4 or mask.shape[1] != 1:
        return False
    return mask.dtype == torch.uint8 or (mask.dtype == torch.int32 and mask.shape[-1] in (0, len(COLUMNS)))


def _packed_offsets(position_ids: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Offsets of the sequences packed into each row, found where positions do not go on; None if none are.

    Only a forward without a cache packs, and then Sq == Sk. Looking costs a device synchronisation a layer:
    pass ``cu_seq_lens_q`` on a GPU.
    """
    if position_ids is None or position_ids.dim() != 2 or q.shape[1] != k.shape[1] or q.shape[1] < 2:
        return None
    if position_ids.shape[1] != q.shape[1] or torch.compiler.is_compiling():
        return None
    jumps = position_ids[:, 1:] - position_ids[:, :-1] != 1
    if not bool(jumps.any()):
        return None
    starts = torch.nn.functional.pad(jumps, (1, 0), value=True).expand(q.shape[0], -1)
    begins = starts.reshape(-1).nonzero()[:, 0]
    return torch.nn.functional.pad(begins, (0, 1), value=starts.numel()).int()


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    max_q: int | None,
    max_k: int | None,
    options: dict[str, Any],
) -> Tensor:
    out = flash_attention_varlen(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        cu_q.int(),
        (cu_q if cu_k is None else cu_k).int(),
        q.shape[0] * q.shape[1] if max_q is None else int(max_q),
        k.shape[0] * k.shape[1] if max_k is None else int(max_k),
        **options,
    ).out
    return out.view(*q.shape[:2], *out.shape[1:])


def _padded(q: Tensor, k: Tensor, v: Tensor, table: Tensor, options: dict[str, Any]) -> Tensor:
    """Rows of a padded batch as offsets into the flattened batch; padding is never touched and gives 0."""
    first_query, num_queries, first_key, num_keys, key_start = (x.contiguous() for x in table.unbind(-1))
    out = flash_attention_varlen(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        _row_offsets(first_query, q.shape[1]),
        _row_offsets(first_key, k.shape[1]),
        q.shape[1],
        k.shape[1],
        seqused_q=num_queries,
        seqused_k=num_keys,
        kv_start=key_start,
        **options,
    ).out
    return out.view(*q.shape[:2], *out.shape[1:])


def _row_offsets(first: Tensor, width: int) -> Tensor:
    """Memory offsets ``[B + 1]`` of rows that begin ``first`` columns into their ``width``."""
    rows = torch.arange(len(first), device=first.device, dtype=torch.int32) * width
    end = torch.full((1,), len(first) * width, device=first.device, dtype=torch.int32)
    return torch.cat((rows + first, end))

"""Megatron's dynamic inference: its engine goes past the core attention, straight to a paged kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_attn_plugin.ops.attention import flash_attention_paged


def flash_decode_and_prefill(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqlens_k: Tensor,
    block_table: Tensor,
    is_decode_only: bool,
    softmax_offset: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """In place of the method of the same name of Megatron's ``Attention``: prefill, decode or both.

    Rows of requests that are only there for a CUDA graph have no queries. Blocks beyond a request's length are never
    read, whatever block the table names there.

    Args:
        self: the attention layer, whose ``softmax_scale`` and core attention's window and sinks count.
        q: ``[tokens, 1, np, hn]``.
        k: ``[blocks, block_size, ng, hn]``, rotated, new tokens included.
        v: as k.
        max_seqlen_q: host bound.
        max_seqlen_k: host bound.
        cu_seqlens_q: int32 ``[requests + 1]``.
        cu_seqlens_k: unused.
        seqlens_k: int32 ``[requests]``.
        block_table: int32 ``[requests, max_blocks]``.
        is_decode_only: unused, one kernel does both.
        softmax_offset: sinks of this call.

    Returns:
        ``[tokens, 1, np, hn]``.
    """
    del cu_seqlens_k, is_decode_only
    core = self.core_attention
    scale = getattr(self, "softmax_scale", None)
    found = flash_attention_paged(
        q.squeeze(1), k, v, cu_seqlens_q.int(), seqlens_k.int(), block_table.int(), int(max_seqlen_q), int(max_seqlen_k),
        causal=True, scale=core.softmax_scale if scale is None else scale, window=core.window,
        sinks=core.softmax_offset if softmax_offset is None else softmax_offset,
    )  # fmt: skip
    return found.out.unsqueeze(1)

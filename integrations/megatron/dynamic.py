"""Megatron's dynamic inference: its engine goes past the core attention, straight to a paged kernel."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
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
) -> Tensor:
    """In place of the method of the same name of Megatron's ``Attention``: prefill, decode or both.

    Rows of requests that are only there for a CUDA graph have no queries. Blocks beyond a request's length are never
    read, whatever block the table names there.

    Args:
        self: the attention layer, whose core attention's scale, window and sinks count.
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
        softmax_offset: unused, the core attention's is the same.

    Returns:
        ``[tokens, 1, np, hn]``; tokens beyond the last request's are 0.
    """
    del cu_seqlens_k, is_decode_only, softmax_offset
    core = self.core_attention
    found = flash_attention_paged(
        q.squeeze(1), k, v, cu_seqlens_q.int(), seqlens_k.int(), block_table.int(), int(max_seqlen_q), int(max_seqlen_k),
        causal=True, scale=core.softmax_scale, window=core.window, sinks=core.softmax_offset,
    )  # fmt: skip
    return found.out.unsqueeze(1)


class SelfAttention(MegatronSelfAttention):
    """Megatron's, whose dynamic inference runs the attention that training runs."""

    flash_decode_and_prefill = flash_decode_and_prefill

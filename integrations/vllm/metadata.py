"""One step of the engine as `flash_attention_paged` takes it, made once and shared by all layers of a cache group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers

from rl_attn_plugin.ops.cache import plan_paged
from rl_attn_plugin.types import PagedPlan


@dataclass
class RLAttentionMetadata(AttentionMetadata):
    """Prompt chunks, decoded and speculated tokens of one step, in vLLM's words.

    Attributes:
        num_actual_tokens: new tokens, padding not counted.
        query_start_loc: int32 ``[B + 1]`` offsets of the requests' new tokens.
        seq_lens: int32 ``[B]`` keys of each request, new ones included.
        block_table: int32 ``[B, max_blocks]``.
        slot_mapping: int64 ``[T]``, -1 for padding.
        max_query_len: most new tokens of a request.
        max_seq_len: at least the longest request.
        plan: how the step is spread over a GPU.
    """

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    plan: PagedPlan | None


class RLAttentionMetadataBuilder(AttentionMetadataBuilder[RLAttentionMetadata]):
    """Makes the metadata of a step."""

    # A plan reads the lengths on the host, which a captured graph cannot. vLLM still captures all that lies between
    # two attentions.
    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        """Note the shapes of the group's layers."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.num_heads: int = get_num_attention_heads_from_layers(
            vllm_config, layer_names
        ) or vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RLAttentionMetadata:
        """The step's metadata; a plan too, unless it is for a few layers only (``fast_build``).

        Raises:
            NotImplementedError: for attention that is not causal.
        """
        del common_prefix_len  # vLLM keeps it for old backends; prefixes are in the block table
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(
                "attention_backend='CUSTOM' is causal only, got a step with "
                f"causal={common.causal if isinstance(common.causal, bool) else 'a mask per request'}"
            )
        plan = None if fast_build else self._plan(common.query_start_loc, common.seq_lens)
        return RLAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            plan=plan,
        )

    def _plan(self, query_start_loc: Tensor, seq_lens: Tensor) -> PagedPlan:
        spec = self.kv_cache_spec
        return plan_paged(
            query_start_loc,
            seq_lens,
            num_heads=self.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            v_head_dim=spec.head_size_v,
            dtype=self.vllm_config.model_config.dtype,
        )

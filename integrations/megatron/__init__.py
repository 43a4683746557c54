"""Megatron-core: a core attention for training and inference, its layer spec, and a swap in place."""

from __future__ import annotations

from rl_attn_plugin.integrations.megatron.capture import capture_attention_inputs
from rl_attn_plugin.integrations.megatron.core_attention import CoreAttention
from rl_attn_plugin.integrations.megatron.spec import gpt_layer_spec, with_core_attention
from rl_attn_plugin.integrations.megatron.swap import swap_attention

__all__ = [
    "CoreAttention",
    "capture_attention_inputs",
    "gpt_layer_spec",
    "swap_attention",
    "with_core_attention",
]

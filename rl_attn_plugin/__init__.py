"""Attention that RL trainers and rollout workers share, and the tools that prove they agree.

Importing this package needs torch alone; kernels and frameworks are imported when they are used.
"""

from __future__ import annotations

from typing import Any

from rl_attn_plugin.invariant import batch_invariant
from rl_attn_plugin.modules import FlashAttention
from rl_attn_plugin.ops.attention import flash_attention, flash_attention_paged, flash_attention_varlen
from rl_attn_plugin.ops.cache import merge_attention, plan_paged, write_kv_cache
from rl_attn_plugin.ops.rope import apply_rope
from rl_attn_plugin.types import AttentionOutput, Impl, PagedPlan, Rope, Schedule

__version__ = "0.1.0"

__all__ = [
    "AttentionOutput",
    "FlashAttention",
    "Impl",
    "PagedPlan",
    "Rope",
    "Schedule",
    "apply_rope",
    "batch_invariant",
    "capture_attention_inputs",
    "flash_attention",
    "flash_attention_paged",
    "flash_attention_varlen",
    "merge_attention",
    "plan_paged",
    "swap_attention",
    "write_kv_cache",
]


def __getattr__(name: str) -> Any:
    """What needs a framework is imported when it is asked for."""
    if name == "swap_attention":
        from rl_attn_plugin.integrations.swapping import swap_attention

        return swap_attention
    if name == "capture_attention_inputs":
        from rl_attn_plugin.integrations.capturing import capture_attention_inputs

        return capture_attention_inputs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

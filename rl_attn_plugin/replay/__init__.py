"""One attention layer, the same q, k, v: computed the trainer's way and the rollout's ways, and compared."""

from __future__ import annotations

from rl_attn_plugin.replay.compare import (
    compare_attention,
    compare_decode_replay,
    compare_single_gpu_attention,
    compare_single_gpu_rope_attention,
)
from rl_attn_plugin.replay.decode import DecodeOptions
from rl_attn_plugin.replay.difference import TensorDrift, tensor_drift
from rl_attn_plugin.replay.inputs import AttentionComparisonInputs, synthetic_inputs
from rl_attn_plugin.replay.results import (
    AttentionComparisonReport,
    AttentionPathDrift,
    PathProvenance,
    Unavailable,
)
from rl_attn_plugin.replay.te_oracle import MergeMode, TEOracle, TEUnavailable, load_te_oracle

__all__ = [
    "AttentionComparisonInputs",
    "AttentionComparisonReport",
    "AttentionPathDrift",
    "DecodeOptions",
    "MergeMode",
    "PathProvenance",
    "TEOracle",
    "TEUnavailable",
    "TensorDrift",
    "Unavailable",
    "compare_attention",
    "compare_decode_replay",
    "compare_single_gpu_attention",
    "compare_single_gpu_rope_attention",
    "load_te_oracle",
    "synthetic_inputs",
    "tensor_drift",
]

"""transformers (5.x): the attention, a paged cache, rollout sessions, packed scoring, and weights.

`register` makes ``attn_implementation="rl_attn"`` known to every transformers model; the functions below call
it themselves. One loaded model serves both attentions: `attention_implementation` switches it.

A session is a batch of rows with a KV cache. ``feed`` appends tokens to some rows (a prompt chunk of each,
one decoded token of each, or any mix; rows left out wait) and returns the logits of the last new tokens asked
for.
"""

from __future__ import annotations

from rl_attn_plugin.integrations.transformers.capture import capture_attention_inputs
from rl_attn_plugin.integrations.transformers.paged import PagedCache, paged_forward
from rl_attn_plugin.integrations.transformers.scoring import score_packed
from rl_attn_plugin.integrations.transformers.sessions import NativeSession, PagedSession
from rl_attn_plugin.integrations.transformers.swap import swap_attention
from rl_attn_plugin.integrations.transformers.switch import attention_implementation, register
from rl_attn_plugin.integrations.transformers.weights import (
    load_config,
    load_model,
    load_tokenizer,
    tokenizer_sha256,
    weights_sha256,
)

__all__ = [
    "NativeSession",
    "PagedCache",
    "PagedSession",
    "attention_implementation",
    "capture_attention_inputs",
    "load_config",
    "load_model",
    "load_tokenizer",
    "paged_forward",
    "register",
    "score_packed",
    "swap_attention",
    "tokenizer_sha256",
    "weights_sha256",
]

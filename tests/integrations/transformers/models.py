"""Tiny randomly initialised models of several families."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
)

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}

CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral-window": MistralConfig(**SIZES, sliding_window=7),
    "gemma2-softcap-window": Gemma2Config(**SIZES, sliding_window=7, query_pre_attn_scalar=16),
    "gpt-oss-sinks": GptOssConfig(
        **SIZES, sliding_window=8, num_local_experts=4, num_experts_per_tok=2, attention_dropout=0.0
    ),
}


def make(name: str, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same weights for the same name, whatever the attention."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])  # a model keeps and changes its config
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the default init is so small that attention hardly matters
            parameter.normal_(0, 0.15) if parameter.dim() > 1 else None
        for module in model.modules():
            if hasattr(module, "sinks"):
                module.sinks.normal_(0, 2.0)
    return model


def native(name: str) -> str:
    """The attention that each family's own numbers come from: sdpa knows neither sinks nor softcap."""
    return "eager" if "sinks" in name or "gemma2" in name else "sdpa"

"""What a real model hands to its attention, kept, saved, and taken through every path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl_attn_plugin import flash_attention_varlen
from rl_attn_plugin.integrations.transformers import (
    capture_attention_inputs,
    load_model,
    load_tokenizer,
    register,
)
from rl_attn_plugin.replay import compare_attention
from rl_attn_plugin.replay.captures import load_captures
from tests.integrations.transformers.models import CONFIGS, make
from tests.replay.te_wheels import installed

TEXTS = (
    "The trainer recomputes the log-probs of tokens that the rollout sampled, and expects the same numbers.",
    "Ein Satz in einer anderen Sprache, 数学 and some code: def f(x): return x ** 2 + 1",
)


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_kept_is_what_the_layer_attends_to(kind: str) -> None:
    """The layer's own output follows from the kept inputs, options and padding."""
    register()
    model = make(kind, "rl_attn")
    outputs: dict[int, torch.Tensor] = {}
    for n, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, args, n=n: outputs.__setitem__(n, args[0].detach())
        )
    rows = [list(range(3, 30)), list(range(5, 16))]
    found = capture_attention_inputs(model, rows, layers=[0, 1])
    for n, inputs in enumerate(found.values()):
        for b, row in enumerate(rows):
            size = len(row)
            q, k, v = (x[b, :size] for x in (inputs.q, inputs.k, inputs.v))
            cu = torch.tensor([0, size], dtype=torch.int32)
            out = flash_attention_varlen(
                q, k, v, cu, cu, size, size, scale=inputs.scale, window=inputs.window, softcap=inputs.softcap,
                sinks=inputs.sinks,
            ).out  # fmt: skip
            torch.testing.assert_close(out.flatten(1), outputs[n][b, :size], atol=1e-5, rtol=1e-5)


def test_the_attention_function_is_put_back() -> None:
    model = make("llama", "sdpa")
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    overrides = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    capture_attention_inputs(model, torch.arange(10)[None])
    with pytest.raises(ValueError, match=r"layers must be -3 to 2, got \[5\]"):
        capture_attention_inputs(model, torch.arange(10)[None], layers=[5])
    with pytest.raises(ValueError, match=r"at least one token a sequence, got lengths \[2, 0\]"):
        capture_attention_inputs(model, [[1, 2], []])
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="looks up by name, got 'eager'"):
        capture_attention_inputs(model, torch.arange(10)[None])
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == before
    assert ALL_ATTENTION_FUNCTIONS._local_mapping == overrides


@pytest.mark.slow
def test_layers_of_smollm2_go_through_every_path(tmp_path: Path) -> None:
    """Real weights, real text, TransformerEngine's real merge."""
    tokenizer, model = load_tokenizer("smollm2"), load_model("smollm2", dtype=torch.bfloat16)
    tokens = [tokenizer.encode(text) for text in TEXTS]
    capture_attention_inputs(model, tokens, layers=[0, 15, -1], folder=tmp_path)
    layers = load_captures(tmp_path)
    assert list(layers) == ["layer-00", "layer-15", "layer-29"]
    with installed("2.19.0"):
        reports = [
            compare_attention(inputs, kv_page_size=8, impl="torch", label=label)
            for label, inputs in layers.items()
        ]
    for report in reports:
        assert report.verdict == "PASS", report.reasons
        names = {row.name for row in report.drifts}
        assert names >= {
            "chunked_prefill", "paged_kv", "paged_kv_merge", "transformer_engine_paged_kv", "fp8_kv_cache",
            "decode_replay", "decode_replay:prefix_shared", "torch-flash:decode",
        }  # fmt: skip
        assert report.shapes["padding"] > 0

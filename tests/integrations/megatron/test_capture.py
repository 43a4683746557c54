"""What layers hand to their core attention, kept and computed every way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install 'rl-attn-plugin[megatron]'")

from rl_attn_plugin import capture_attention_inputs
from rl_attn_plugin.reference import attention_reference
from rl_attn_plugin.replay import compare_attention
from rl_attn_plugin.replay.captures import load_captures
from tests.integrations.megatron.models import DEVICE, VOCABULARY, config, model

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("default")]


def test_captured_layers_go_through_every_path(tmp_path: Path) -> None:
    made = model(config(window_size=(9, 0), softmax_type="learnable"))
    tokens = torch.randint(VOCABULARY, (2, 33), device=DEVICE)
    outputs: dict[int, Tensor] = {}
    for n, layer in enumerate(made.decoder.layers):
        layer.self_attention.core_attention.register_forward_hook(
            lambda module, given, out, n=n: outputs.__setitem__(n, out)
        )
    found = capture_attention_inputs(made, tokens, layers=[0, -1], folder=tmp_path)
    assert list(found) == list(load_captures(tmp_path)) == ["layer-00", "layer-01"]
    for n, (label, inputs) in enumerate(found.items()):
        report = compare_attention(inputs, kv_page_size=8, include_peers=False, impl="torch", label=label)
        assert report.verdict == "PASS", report.reasons
        for b in range(2):
            exact, _ = attention_reference(
                inputs.q[b],
                inputs.k[b],
                inputs.v[b],
                scale=inputs.scale,
                window=inputs.window,
                sinks=inputs.sinks,
            )
            torch.testing.assert_close(outputs[n][:, b].double(), exact.flatten(1), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"layers must be -2 to 1, got \[2\]"):
        capture_attention_inputs(made, tokens, layers=[2])
    with pytest.raises(ValueError, match=r"at least one token, got \[2, 0\]"):
        capture_attention_inputs(made, tokens[:, :0])

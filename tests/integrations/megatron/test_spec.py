"""Specs: Megatron's own choice of parts, with the plugin's attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install 'rl-attn-plugin[megatron]'")

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec, import_module

from rl_attn_plugin.integrations.megatron import CoreAttention, gpt_layer_spec, with_core_attention
from rl_attn_plugin.integrations.megatron.dynamic import SelfAttention
from tests.integrations.megatron.models import DEVICE, config, local_spec, model, positions

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("changes", [{}, {"qk_layernorm": True}, {"normalization": "LayerNorm"}], ids=str)
def test_what_the_command_line_names_builds_a_model(changes: dict[str, Any]) -> None:
    """``--spec A B`` hands the object of that name to the model, which calls nothing."""
    spec = import_module(("rl_attn_plugin.integrations.megatron", "gpt_layer_spec"))
    assert spec is gpt_layer_spec
    made = model(config(**changes), spec)
    for layer in made.decoder.layers:
        assert type(layer.self_attention.core_attention) is CoreAttention
        assert type(layer.self_attention) is SelfAttention
    assert ("q_layernorm" in str(list(made.state_dict()))) == bool(changes.get("qk_layernorm"))


def test_experts_lie_where_the_config_puts_them() -> None:
    made = model(config(num_moe_experts=4, moe_layer_freq=[0, 1]), gpt_layer_spec)
    assert [hasattr(layer.mlp, "router") for layer in made.decoder.layers] == [False, True]


def test_block_specs_are_copied() -> None:
    made_for = config()
    spec = get_gpt_decoder_block_spec(made_for, use_transformer_engine=False, normalization="RMSNorm")
    before = str(spec)
    ours = with_core_attention(spec)
    for theirs, layer in zip(spec.layer_specs, ours.layer_specs, strict=True):
        assert theirs.submodules.self_attention.submodules.core_attention is DotProductAttention
        assert layer.submodules.self_attention.submodules.core_attention is CoreAttention
        assert layer.submodules.self_attention.module is SelfAttention
    assert str(spec) == before
    ids = torch.arange(7, device=DEVICE)[None]
    assert torch.equal(
        model(made_for, ours)(ids, positions(1, 7), None),
        model(made_for, gpt_layer_spec)(ids, positions(1, 7), None),
    )


class SparseAttention:
    """Another attention, which must not be mistaken for a plain one."""


def test_other_attentions_are_refused() -> None:
    spec = local_spec(config())
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=SparseAttention)
    with pytest.raises(
        ValueError, match="must be given a spec that builds one of DotProductAttention, TEDot"
    ):
        with_core_attention(spec)
    assert spec.submodules.self_attention.submodules.core_attention.module is SparseAttention

"""Swapping the attention of a model that is there already, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install 'rl-attn-plugin[megatron]'")

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention

import rl_attn_plugin
from rl_attn_plugin.integrations.megatron import CoreAttention, gpt_layer_spec, swap_attention
from rl_attn_plugin.integrations.megatron.dynamic import flash_decode_and_prefill
from tests.integrations.megatron.models import (
    DEVICE,
    VOCABULARY,
    config,
    latent_model_with_their_core,
    local_spec,
    model,
    positions,
)

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("default")]
NAMES = [f"decoder.layers.{n}.self_attention.core_attention" for n in range(2)]


def theirs(**changes: Any) -> GPTModel:
    made_for = config(**changes)
    return model(made_for, local_spec(made_for))


def cores(made: GPTModel) -> list[Any]:
    return [layer.self_attention.core_attention for layer in made.decoder.layers]


def logits(made: GPTModel) -> Tensor:
    ids = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    return made(ids, positions(2, 20), None)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"softmax_type": "learnable"}, {"softmax_type": "off-by-one"}, {"window_size": (5, 0)}, {"softmax_scale": 0.4},
        {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
    ],
    ids=str,
)  # fmt: skip
def test_there_and_back(changes: dict[str, Any]) -> None:
    made = theirs(**changes)
    originals, parameters = cores(made), dict(made.named_parameters())
    before = logits(made)
    with rl_attn_plugin.swap_attention(made) as handle:
        assert handle.replaced == NAMES and not handle.left
        assert str(handle) == f"2 replaced: {', '.join(NAMES)}"
        assert all(type(core) is CoreAttention for core in cores(made))
        assert (
            made.decoder.layers[0].self_attention.flash_decode_and_prefill.__func__
            is flash_decode_and_prefill
        )
        inside = dict(made.named_parameters())
        assert inside.keys() == parameters.keys()
        assert all(inside[name] is parameter for name, parameter in parameters.items())  # the optimizer's own
        swapped = logits(made)
        torch.testing.assert_close(swapped, before, rtol=1e-4, atol=1e-5)
        assert not torch.equal(swapped, before)
    assert all(core is original for core, original in zip(cores(made), originals, strict=True))
    assert "flash_decode_and_prefill" not in vars(made.decoder.layers[0].self_attention)
    assert torch.equal(logits(made), before)
    handle.restore()  # again: nothing happens
    assert all(core is original for core, original in zip(cores(made), originals, strict=True))


def test_nested_and_repeated() -> None:
    made = theirs()
    originals = cores(made)
    with swap_attention(made):
        outer = cores(made)
        with swap_attention(made) as inner:
            assert not inner.replaced and inner.left == dict.fromkeys(NAMES, "it is the plugin's already")
        assert all(core is ours for core, ours in zip(cores(made), outer, strict=True))
    for _ in range(2):
        handle = swap_attention(made)
        assert handle.replaced == NAMES
        handle.restore()
    assert all(core is original for core, original in zip(cores(made), originals, strict=True))


def test_a_hook_that_was_there_comes_back() -> None:
    made = theirs()
    layer = made.decoder.layers[0].self_attention
    layer.flash_decode_and_prefill = own = lambda *_: None
    with swap_attention(made):
        assert layer.flash_decode_and_prefill is not own
    assert layer.flash_decode_and_prefill is own


def test_random_numbers_stay_as_they_are() -> None:
    made = theirs(softmax_type="learnable")
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    swap_attention(made)
    assert torch.equal(torch.rand(3), wanted)


def test_the_mode_set_meanwhile_stays() -> None:
    made = theirs().train()
    with swap_attention(made):
        assert all(core.training for core in cores(made))
        made.eval()
    assert not any(core.training for core in cores(made))


def test_checkpoints_fit_before_inside_and_after() -> None:
    made, other = theirs(softmax_type="learnable"), theirs(softmax_type="learnable")
    state = made.state_dict()
    with swap_attention(other):
        assert list(other.state_dict()) == list(state)
        other.load_state_dict(state)
    assert torch.equal(cores(other)[0].softmax_offset, cores(made)[0].softmax_offset)


class Custom(DotProductAttention):
    """Someone's own."""


def test_what_is_left_and_why() -> None:
    made = theirs(attention_dropout=0.5).train()
    made.decoder.layers[1].self_attention.core_attention.attention_dropout.p = 0.0
    made.decoder.layers[1].self_attention.core_attention.__class__ = Custom
    handle = swap_attention(made)
    assert not handle.replaced and handle.left == {
        NAMES[0]: "attention_dropout must be 0 in training (--attention-dropout 0), got 0.5",
        NAMES[1]: "Custom is none of DotProductAttention, TEDotProductAttention",
    }
    assert "left " + NAMES[1] in str(handle)
    assert all(isinstance(core, DotProductAttention) for core in cores(made))
    assert swap_attention(made.eval()).replaced == NAMES[:1]  # evaluation drops nothing


def test_what_the_new_one_refuses_is_left() -> None:
    made = theirs()
    cores(made)[0].config.fp8_dot_product_attention = True
    handle = swap_attention(made)
    assert handle.left == dict.fromkeys(
        NAMES, "CoreAttention: fp8_dot_product_attention must be off, got True"
    )


def test_what_goes_past_the_core_attention_is_named() -> None:
    handle = swap_attention(theirs(flash_decode=True))
    assert handle.replaced == NAMES
    assert (
        "config.flash_decode sends static decoding past"
        in handle.left["decoder.layers.0.self_attention.flash_decode"]
    )


@pytest.mark.usefixtures("no_te")
def test_multi_latent_attention_decodes_as_before() -> None:
    made = latent_model_with_their_core()
    before = logits(made)
    with swap_attention(made) as handle:
        assert handle.replaced == NAMES
        layer = made.decoder.layers[0].self_attention
        assert "flash_decode_and_prefill" not in vars(layer)
        left = handle.left["decoder.layers.0.self_attention.flash_decode_and_prefill"]
        assert left.startswith("multi-latent attention decodes in its latent space")
        torch.testing.assert_close(logits(made), before, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(made), before)


def test_a_model_built_by_spec_needs_no_swap() -> None:
    made = model(config(), gpt_layer_spec)
    assert swap_attention(made).left == dict.fromkeys(NAMES, "it is the plugin's already")

"""Swapping TransformerEngine's attention inside other modules. The real one runs on a GPU alone: see test_gpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rl_attn_plugin
from rl_attn_plugin.integrations.transformer_engine import DotProductAttention, swap_attention


class Theirs(nn.Module):
    """The attributes that TransformerEngine's module keeps, in releases before ``bottom_right_diagonal`` and ``name``."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.num_attention_heads, self.num_gqa_groups, self.tp_size, self.cp_group = 8, 4, 2, None
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = 16, 24
        self.attention_dropout, self.qkv_format, self.attn_mask_type = 0.0, "bshd", "causal"
        self.window_size, self.softmax_type, self.return_max_logit = (5, 0), "learnable", False
        self.flash_attention = SimpleNamespace(softmax_scale=0.3)
        self.softmax_offset = nn.Parameter(torch.randn(4))
        for name, value in changes.items():
            setattr(self, name, value)

    def forward(self, *_: Tensor) -> str:
        return "theirs"


Theirs.__name__, Theirs.__module__ = "DotProductAttention", "transformer_engine.pytorch.attention"
Wrapped = type("TEDotProductAttention", (Theirs,), {"__module__": "somewhere"})


class Layer(nn.Module):
    """As TransformerEngine's ``MultiheadAttention``: its attention is an attribute."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core_attention = core

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.core_attention(q, k, v)


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 9, h, d) for h, d in ((4, 16), (2, 16), (2, 24))]


def test_there_and_back() -> None:
    model = nn.Sequential(Layer(Theirs()), Layer(Theirs()))
    originals = [layer.core_attention for layer in model]
    parameters = dict(model.named_parameters())
    with swap_attention(model) as handle:
        assert handle.replaced == ["0.core_attention", "1.core_attention"] and not handle.left
        ours = model[0].core_attention
        assert type(ours) is DotProductAttention
        assert all(x is parameters[name] for name, x in model.named_parameters())
        assert model.state_dict().keys() == parameters.keys()
        own = DotProductAttention(8, (16, 24), 4, 0.0, "bshd", "causal", (5, 0), tp_size=2, softmax_scale=0.3,
                                  softmax_type="learnable").cpu()  # fmt: skip
        own.softmax_offset = originals[0].softmax_offset
        assert torch.equal(model[0](*qkv()), own(*qkv()))
        with swap_attention(model) as again:
            assert not again.replaced and set(again.left.values()) == {"it is the plugin's already"}
        assert model[0].core_attention is ours
        model.eval()
    assert all(layer.core_attention is original for layer, original in zip(model, originals, strict=True))
    assert model[0](*qkv()) == "theirs" and not originals[0].training  # the mode set meanwhile stays
    handle.restore()  # again: nothing happens
    assert swap_attention(model).replaced == handle.replaced


def test_the_packages_own_swap_takes_such_a_model() -> None:
    model = nn.Sequential(Layer(Theirs()))
    with rl_attn_plugin.swap_attention(model) as handle:
        assert handle.replaced == ["0.core_attention"]
        with rl_attn_plugin.swap_attention(model) as again:
            assert not again.replaced and set(again.left.values()) == {"it is the plugin's already"}
    with pytest.raises(TypeError, match="swap_attention takes a transformers or a Megatron-core model, got"):
        rl_attn_plugin.swap_attention(nn.Linear(2, 2))


def test_a_plain_softmax_and_newer_attributes() -> None:
    theirs = Theirs(
        softmax_type="vanilla",
        attn_mask_type="padding",
        bottom_right_diagonal=False,
        name="core",
        window_size=(5, 2),
    )
    theirs.softmax_offset = None
    holder = nn.ModuleList([theirs])
    assert swap_attention(holder).replaced == ["0"]
    assert (holder[0].softmax_offset, holder[0].bottom_right_diagonal, holder[0].name) == (
        None,
        False,
        "core",
    )


@pytest.mark.parametrize(
    ("core", "reason"),
    [
        (Wrapped(), "TEDotProductAttention is a subclass of DotProductAttention: its call may be another"),
        (Theirs(attention_dropout=0.1), "attention_dropout must be 0 in training, got 0.1"),
        (Theirs(cp_group="g"), "DotProductAttention: cp_group must be None: there is no context parallelism, got g"),
        (Theirs(attn_mask_type="arbitrary"), "DotProductAttention: attn_mask_type must be one of"),
    ],
    ids=["subclass", "dropout", "cp", "mask"],
)  # fmt: skip
def test_what_is_left_and_why(core: nn.Module, reason: str) -> None:
    layer = Layer(core)
    handle = swap_attention(layer)
    assert not handle.replaced and list(handle.left) == ["core_attention"]
    assert handle.left["core_attention"].startswith(reason)
    assert layer.core_attention is core


def test_dropout_is_no_reason_in_evaluation() -> None:
    assert swap_attention(Layer(Theirs(attention_dropout=0.1)).eval()).replaced == ["core_attention"]


def test_attentions_of_others_are_not_touched() -> None:
    model = Layer(nn.MultiheadAttention(8, 2))
    handle = swap_attention(model)
    assert not handle.replaced and not handle.left

"""Putting the plugin's attention into modules that hold TransformerEngine's."""

from __future__ import annotations

from typing import Any

from torch import nn

from rl_attn_plugin.integrations.swapping import SwapHandle
from rl_attn_plugin.integrations.transformer_engine.attention import DotProductAttention


def swap_attention(model: nn.Module) -> SwapHandle:
    """Replace every ``DotProductAttention`` of TransformerEngine inside a module, by its class's name.

    Parameters are shared, not copied. Swapping twice nests; each handle brings back what it found. For Megatron's models,
    whose attention has a call of its own, there is `rl_attn_plugin.integrations.megatron.swap_attention`.

    Args:
        model: what holds the attention, such as a ``TransformerLayer``.

    Returns:
        What was replaced, what was left and why, and the way back.
    """
    handle = SwapHandle()
    for parent_name, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            label = f"{parent_name}.{name}" if parent_name else name
            if isinstance(child, DotProductAttention):
                handle.left[label] = "it is the plugin's already"
                continue
            if not any(_is_theirs(base) for base in type(child).__mro__):
                continue
            reason, ours = _ours(child)
            if ours is None:
                handle.left[label] = reason
                continue
            setattr(parent, name, ours)
            handle._undo.append(lambda parent=parent, name=name, child=child: _put_back(parent, name, child))  # type: ignore[misc]
            handle.replaced.append(label)
    return handle


def _is_theirs(kind: type) -> bool:
    return kind.__name__ == "DotProductAttention" and kind.__module__.split(".")[0] == "transformer_engine"


def _ours(theirs: Any) -> tuple[str, DotProductAttention | None]:
    """The replacement, or the reason why there is none."""
    if not _is_theirs(type(theirs)):
        return f"{type(theirs).__name__} is a subclass of DotProductAttention: its call may be another", None
    if theirs.attention_dropout and theirs.training:
        return f"attention_dropout must be 0 in training, got {theirs.attention_dropout}", None
    try:
        return "", _like(theirs)
    except ValueError as reason:
        return str(reason), None


def _like(theirs: Any) -> DotProductAttention:
    """One with everything that the other was made with; what its release does not know is off."""
    ours = DotProductAttention(
        theirs.num_attention_heads,
        (theirs.hidden_size_per_attention_head_k, theirs.hidden_size_per_attention_head_v),
        theirs.num_gqa_groups,
        theirs.attention_dropout,
        theirs.qkv_format,
        theirs.attn_mask_type,
        theirs.window_size,
        bottom_right_diagonal=getattr(theirs, "bottom_right_diagonal", None),
        tp_size=theirs.tp_size,
        softmax_scale=theirs.flash_attention.softmax_scale,
        softmax_type=getattr(theirs, "softmax_type", "vanilla"),
        return_max_logit=getattr(theirs, "return_max_logit", False),
        cp_group=theirs.cp_group,
        name=getattr(theirs, "name", None),
    )
    if getattr(theirs, "softmax_offset", None) is not None:
        ours.softmax_offset = theirs.softmax_offset
    return ours.train(theirs.training)


def _put_back(parent: nn.Module, name: str, theirs: nn.Module) -> None:
    theirs.train(getattr(parent, name).training)  # the mode may have changed meanwhile
    setattr(parent, name, theirs)

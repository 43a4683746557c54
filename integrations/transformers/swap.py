"""Switching a loaded model's attention, with a way back."""

from __future__ import annotations

from transformers import PreTrainedModel

from rl_attn_plugin.integrations.swapping import SwapHandle
from rl_attn_plugin.integrations.transformers.attention import NAME
from rl_attn_plugin.integrations.transformers.switch import register


def swap_attention(model: PreTrainedModel) -> SwapHandle:
    """Run every attention layer of a transformers model through the plugin; `SwapHandle.restore` goes back.

    Args:
        model: a loaded model.

    Returns:
        What was replaced, what was left and why, and the way back.
    """
    register()
    handle = SwapHandle()
    before = model.config._attn_implementation
    layers = [
        name
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx") and hasattr(module, "is_causal")
    ]
    if before == NAME:
        handle.left |= dict.fromkeys(layers, "it is the plugin's already")
        return handle
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, TypeError) as reason:
        handle.left |= dict.fromkeys(layers or [type(model).__name__], str(reason).splitlines()[0])
        return handle
    handle._undo.append(lambda: model.set_attn_implementation(before))
    handle.replaced += layers
    return handle

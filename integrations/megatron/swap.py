"""Putting the plugin's attention into a Megatron model that is there already."""

from __future__ import annotations

import copy
import types
from typing import Any

from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import nn

from rl_attn_plugin.integrations.megatron.core_attention import CoreAttention
from rl_attn_plugin.integrations.megatron.dynamic import SelfAttention, flash_decode_and_prefill
from rl_attn_plugin.integrations.megatron.spec import REPLACEABLE
from rl_attn_plugin.integrations.swapping import SwapHandle


def swap_attention(model: nn.Module) -> SwapHandle:
    """Replace the core attention of every layer of a model, and what its dynamic inference engine calls.

    Parameters are shared, not copied: a learnable softmax offset stays the one that the optimizer knows. Random states
    stay as they are. Swapping a model twice nests; each handle brings back what it found.

    Args:
        model: a Megatron-core model, or anything that holds its attention layers.

    Returns:
        What was replaced, what was left and why, and the way back.
    """
    handle = SwapHandle()
    for name, layer in list(model.named_modules()):
        core: Any = getattr(layer, "core_attention", None)
        if not isinstance(core, nn.Module):
            continue
        prefix = f"{name}." if name else ""
        label = f"{prefix}core_attention"
        reason, ours = _ours(layer, core)
        if ours is None:
            handle.left[label] = reason
            continue
        layer.core_attention = ours
        handle._undo.append(lambda layer=layer, core=core: _put_back(layer, core))  # type: ignore[misc]
        handle.replaced.append(label)
        if isinstance(layer, MultiLatentAttention):
            handle.left[f"{prefix}flash_decode_and_prefill"] = (
                "multi-latent attention decodes in its latent space (head dims 576/512), which the plugin does not"
            )
        elif not isinstance(layer, SelfAttention) and hasattr(layer, "flash_decode_and_prefill"):
            hooked = vars(layer).get("flash_decode_and_prefill")
            layer.flash_decode_and_prefill = types.MethodType(flash_decode_and_prefill, layer)
            handle._undo.append(lambda layer=layer, hooked=hooked: _unhook(layer, hooked))  # type: ignore[misc]
        if ours.config.flash_decode:
            handle.left[f"{prefix}flash_decode"] = (
                "config.flash_decode sends static decoding past the core attention: turn it off"
            )
    return handle


def _ours(layer: Any, core: Any) -> tuple[str, CoreAttention | None]:
    """The replacement, or the reason why there is none."""
    if isinstance(core, CoreAttention):
        return "it is the plugin's already", None
    if type(core).__name__ not in REPLACEABLE:
        return f"{type(core).__name__} is none of {', '.join(REPLACEABLE)}", None
    dropout = getattr(core.attention_dropout, "p", core.attention_dropout)
    if dropout and core.training:
        return f"attention_dropout must be 0 in training (--attention-dropout 0), got {dropout}", None
    try:
        return "", _like(layer, core, dropout)
    except ValueError as reason:
        return str(reason), None


def _like(layer: Any, core: Any, dropout: float) -> CoreAttention:
    """A core attention with everything that the other one was made with."""
    # The offset is taken over below: filling a new one with random numbers would move the generators.
    config = copy.copy(core.config)
    config.perform_initialization = False
    scale = getattr(core, "softmax_scale", None)
    if scale is None:
        scale = core.flash_attention.softmax_scale  # TransformerEngine's keeps it there
    elif config.apply_query_key_layer_scaling:
        scale *= core.layer_number  # Megatron's own has divided it
    ours = CoreAttention(
        config,
        layer.layer_number,
        layer.attn_mask_type,
        layer.attention_type,
        attention_dropout=dropout,
        softmax_scale=scale,
        pg_collection=layer.pg_collection,
        v_channels=getattr(core, "hidden_size_per_attention_head_v", None),
    )
    ours.config = core.config
    if core.softmax_offset is not None:
        ours.softmax_offset = core.softmax_offset
    return ours.train(core.training)


def _put_back(layer: Any, core: nn.Module) -> None:
    core.train(layer.core_attention.training)  # the mode may have changed meanwhile
    layer.core_attention = core


def _unhook(layer: Any, hooked: Any) -> None:
    if hooked is None:
        del layer.flash_decode_and_prefill
    else:
        layer.flash_decode_and_prefill = hooked

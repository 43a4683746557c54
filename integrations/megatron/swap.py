"""Putting the plugin's attention into Megatron models: in their specs, or in a model that is there already."""

from __future__ import annotations

import copy
import types
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from rl_attn_plugin.integrations.megatron.core_attention import CoreAttention
from rl_attn_plugin.integrations.megatron.dynamic import flash_decode_and_prefill
from rl_attn_plugin.integrations.swapping import SwapHandle

_THEIRS = ("DotProductAttention", "TEDotProductAttention")


def gpt_layer_spec(*args: Any, **options: Any) -> ModuleSpec:
    """Megatron's local GPT layer spec with this core attention, for ``--spec``.

    Args:
        args: of ``get_gpt_layer_local_spec``.
        options: of it too.
    """
    return with_core_attention(get_gpt_layer_local_spec(*args, **options))


def with_core_attention(spec: ModuleSpec) -> ModuleSpec:
    """A copy of any layer or block spec in which every self-attention builds `CoreAttention`."""
    spec = copy.deepcopy(spec)
    _replace(spec)
    return spec


def _replace(spec: Any) -> None:
    submodules = getattr(spec, "submodules", spec)
    if submodules is None:
        return
    for name, part in vars(submodules).items():
        if name == "core_attention" and part is not None:
            setattr(submodules, name, CoreAttention)
        elif isinstance(part, list | tuple):
            for item in part:
                if isinstance(item, ModuleSpec):
                    _replace(item)
        elif isinstance(part, ModuleSpec):
            _replace(part)


def swap_attention(model: nn.Module) -> SwapHandle:
    """Replace the core attention of every layer of a model, and what its dynamic inference engine calls.

    Parameters are shared, not copied: a learnable softmax offset stays the one that the optimizer knows. Swapping a model
    twice nests; each handle brings back what it found.

    Args:
        model: a Megatron-core model, or anything that holds its attention layers.

    Returns:
        What was replaced, what was left and why, and the way back.
    """
    handle = SwapHandle()
    for name, layer in model.named_modules():
        core = getattr(layer, "core_attention", None)
        if not isinstance(core, nn.Module):
            continue
        label = f"{name}.core_attention" if name else "core_attention"
        if isinstance(core, CoreAttention):
            handle.left[label] = "it is the plugin's already"
            continue
        if type(core).__name__ not in _THEIRS:
            handle.left[label] = f"{type(core).__name__} is none of {', '.join(_THEIRS)}"
            continue
        try:
            ours = _like(layer, core)
        except ValueError as reason:
            handle.left[label] = str(reason)
            continue
        layer.core_attention = ours
        handle._undo.append(lambda layer=layer, core=core: setattr(layer, "core_attention", core))  # type: ignore[misc]
        if hasattr(type(layer), "flash_decode_and_prefill"):
            before = vars(layer).get("flash_decode_and_prefill")
            layer.flash_decode_and_prefill = types.MethodType(flash_decode_and_prefill, layer)
            handle._undo.append(lambda layer=layer, before=before: _put_back(layer, before))  # type: ignore[misc]
        handle.replaced.append(label)
    return handle


def _put_back(layer: nn.Module, before: Any) -> None:
    if before is None:
        del layer.flash_decode_and_prefill
    else:
        layer.flash_decode_and_prefill = before


def _like(layer: Any, core: Any) -> CoreAttention:
    """A core attention with everything that the other one was made with."""
    ours = CoreAttention(
        core.config,
        core.layer_number,
        getattr(core, "attn_mask_type", layer.attn_mask_type),
        "self",
        softmax_scale=getattr(layer, "softmax_scale", None) or getattr(core.config, "softmax_scale", None),
        pg_collection=getattr(core, "pg_collection", None),
        k_channels=getattr(layer, "q_head_dim", None),
        v_channels=getattr(core.config, "v_head_dim", None) if hasattr(layer, "q_head_dim") else None,
    )
    offset = getattr(core, "softmax_offset", None)
    if offset is not None:
        ours.softmax_offset = offset
    return ours.train(core.training)

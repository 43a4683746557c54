"""Making ``rl_attn`` known to transformers, and running a model with one attention or another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rl_attn_plugin.integrations.transformers.attention import NAME, rl_attn_forward
from rl_attn_plugin.integrations.transformers.masks import rl_attn_mask


def register() -> None:
    """Register attention and mask together under ``"rl_attn"``; doing it again changes nothing, also where a trainer's
    hook has put a function of its own there."""
    if NAME not in AttentionInterface():
        AttentionInterface.register(NAME, rl_attn_forward)
    AttentionMaskInterface.register(NAME, rl_attn_mask)


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run the model with another attention inside the ``with`` block; nests, and restores on errors.

    Args:
        model: a loaded model.
        name: ``"rl_attn"``, ``"sdpa"`` or another that transformers knows.
    """
    if name == NAME:
        register()
    before = model.config._attn_implementation
    if before == name:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)

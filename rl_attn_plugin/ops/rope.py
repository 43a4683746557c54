"""Public rotary embedding."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rl_attn_plugin import validation
from rl_attn_plugin.ops import contracts as contracts  # registers the operators
from rl_attn_plugin.ops.dispatch import resolve_impl
from rl_attn_plugin.types import Impl, Rope


def apply_rope(x: Tensor, rope: Rope, *, impl: Impl | str = Impl.AUTO) -> Tensor:
    """Rotate ``x [T, H, D]`` or ``[B, S, H, D]``: fp32 arithmetic, one rounding, differentiable.

    Args:
        x: the tensor to rotate, any strides.
        rope: tables, and positions ``[T]`` or ``[B, S]``.
        impl: see `flash_attention`.

    Raises:
        ValueError: with every reason.
    """
    why = validation.Reasons("apply_rope")
    if why.need(x.dim() in (3, 4), "x must be [T, H, D] or [B, S, H, D], got {}", validation.shape(x)):
        validation.check_rope(why, x, rope)
    why.done()
    rope = resolved(rope, x.shape[-1])
    chosen = resolve_impl(impl, x.device)
    result: Tensor = torch.ops.rl_attn.apply_rope(
        x, rope.cos, rope.sin, rope.positions, rope.interleaved, rope.rotary_dim, False, chosen.value
    )
    return result


def resolved(rope: Rope, dim: int) -> Rope:
    """``rope`` with no None in it."""
    return replace(
        rope,
        rotary_dim=dim if rope.rotary_dim is None else rope.rotary_dim,
        positions_k=rope.positions if rope.positions_k is None else rope.positions_k,
    )

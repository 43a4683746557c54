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
    rotary = x.shape[-1] if rope.rotary_dim is None else rope.rotary_dim
    chosen = resolve_impl(impl, x.device)
    result: Tensor = torch.ops.rl_attn.apply_rope(
        x, rope.cos, rope.sin, rope.positions, rope.interleaved, rotary, False, chosen.value
    )
    return result


def rotate(q: Tensor, k: Tensor, rope: Rope, *, paged: bool, impl: Impl) -> tuple[Tensor, Tensor]:
    """q and, unless it lies rotated in a cache, k, rotated before attention."""
    turned = apply_rope(q, rope, impl=impl)
    if paged:
        return turned, k
    positions_k = rope.positions if rope.positions_k is None else rope.positions_k
    if positions_k.shape != k.shape[:-2]:
        raise ValueError(
            f"rope.positions_k must have k's token shape {list(k.shape[:-2])} where it differs from q's, "
            f"got {list(positions_k.shape)}"
        )
    return turned, apply_rope(k, replace(rope, positions=positions_k), impl=impl)

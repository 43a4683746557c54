"""Rotary embedding in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_attn_plugin.types import Rope


def apply_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    interleaved: bool,
    rotary_dim: int,
    inverse: bool,
) -> Tensor:
    """Rotate the leading ``rotary_dim`` channels in fp32 and round once to x's dtype.

    Args:
        x: ``[..., H, D]``.
        cos: fp32 ``[max_position, rotary_dim / 2]``; ``sin`` too.
        sin: see ``cos``.
        positions: ``[...]``, the table row of each token.
        interleaved: pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        rotary_dim: rotated channels.
        inverse: rotate back, which is the gradient.
    """
    c, s = cos[positions.long()][..., None, :], sin[positions.long()][..., None, :]
    if inverse:
        s = -s
    turning, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    half = rotary_dim // 2
    if interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack((first * c - second * s, second * c + first * s), dim=-1).flatten(-2)
    else:
        first, second = turning[..., :half], turning[..., half:]
        turned = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def turn(x: Tensor, rope: Rope, positions: Tensor | None, *, inverse: bool = False) -> Tensor:
    """``x`` rotated by a resolved `Rope`, at other positions than its own."""
    assert positions is not None and rope.rotary_dim is not None
    return apply_rope(
        x, rope.cos, rope.sin, positions, interleaved=rope.interleaved, rotary_dim=rope.rotary_dim, inverse=inverse
    )  # fmt: skip

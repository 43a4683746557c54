"""Rotary tables of the inputs, and a rotation by complex numbers that shares no code with the operator's."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_attn_plugin.replay.inputs import AttentionComparisonInputs
from rl_attn_plugin.types import Rope


def rotary_dim(inputs: AttentionComparisonInputs) -> int:
    """Channels that rotate."""
    return inputs.q.shape[-1] if inputs.rope_rotary_dim is None else inputs.rope_rotary_dim


def positions_of(inputs: AttentionComparisonInputs) -> Tensor:
    """Positions ``[B, S]``."""
    assert inputs.rope_positions is not None
    return inputs.rope_positions.expand(inputs.q.shape[0], inputs.q.shape[1])


def rope_of(inputs: AttentionComparisonInputs, positions: Tensor) -> Rope:
    """Tables up to the largest position, read at ``positions``.

    Angles are ``position * theta ** (-2 i / rotary_dim)`` (Su et al. 2021, RoFormer, section 3.2), formed in fp64 and
    rounded to fp32 once, as cosine and sine.
    """
    every = positions_of(inputs)
    rows = int(every.max()) + 1 if every.numel() else 1
    half = rotary_dim(inputs) // 2
    steps = torch.arange(half, dtype=torch.float64, device=every.device)
    angles = torch.outer(
        torch.arange(rows, dtype=torch.float64, device=every.device), inputs.rope_theta ** (-steps / half)
    )
    return Rope(angles.cos().float(), angles.sin().float(), positions, rotary_dim=rotary_dim(inputs))


def rotate_plainly(x: Tensor, rope: Rope) -> Tensor:
    """``x [B, S, H, D]`` rotated as complex fp64 numbers, rounded once to x's dtype; no fused multiply-add."""
    assert rope.rotary_dim is not None
    half = rope.rotary_dim // 2
    turn = torch.complex(rope.cos.double(), rope.sin.double())[rope.positions.long()][:, :, None]
    z = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double()) * turn
    return torch.cat((z.real.to(x.dtype), z.imag.to(x.dtype), x[..., 2 * half :]), dim=-1)

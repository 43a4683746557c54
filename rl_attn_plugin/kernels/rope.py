"""Rotary embedding: fp32 arithmetic, one rounding, and its inverse, which is the gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_attn_plugin.kernels import schedule


@triton.jit
def rope_kernel(
    X, Out, Cos, Sin, Positions, x_b, x_t, x_h, x_d, out_b, out_t, out_h, positions_b, positions_t, cos_p, cos_d,
    sin_p, sin_d, HALF: tl.constexpr, D: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """One token of one head."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    position = tl.load(Positions + b * positions_b + t * positions_t).to(tl.int64)
    i = tl.arange(0, BLOCK_HALF)
    inside = i < HALF
    cos = tl.load(Cos + position * cos_p + i * cos_d, mask=inside, other=0.0)
    sin = tl.load(Sin + position * sin_p + i * sin_d, mask=inside, other=0.0)
    if INVERSE:
        sin = -sin
    if INTERLEAVED:
        first = 2 * i
        second = 2 * i + 1
    else:
        first = i
        second = i + HALF
    source = X + b * x_b + t * x_t + head * x_h
    target = Out + b * out_b + t * out_t + head * out_h
    x = tl.load(source + first * x_d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + second * x_d, mask=inside, other=0.0).to(tl.float32)
    # the contraction is written out: the same rotation inside another kernel must give the same bits
    turned = tl.fma(x, cos, -(y * sin))
    other = tl.fma(y, cos, x * sin)
    tl.store(target + first, turned.to(Out.dtype.element_ty), mask=inside)
    tl.store(target + second, other.to(Out.dtype.element_ty), mask=inside)
    if 2 * HALF < D:
        d = tl.arange(0, BLOCK_D)
        rest = (d >= 2 * HALF) & (d < D)
        tl.store(target + d, tl.load(source + d * x_d, mask=rest, other=0.0), mask=rest)


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
    """Rotate the leading ``rotary_dim`` channels.

    Args:
        x: ``[T, H, D]`` or ``[B, S, H, D]``, any strides.
        cos: fp32 ``[max_position, rotary_dim / 2]``; ``sin`` too.
        sin: see ``cos``.
        positions: ``[T]`` or ``[B, S]``, the table row of each token.
        interleaved: pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        rotary_dim: rotated channels.
        inverse: rotate back.

    Returns:
        A contiguous tensor like ``x``.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    given, result, places = (x, out, positions) if x.dim() == 4 else (x[None], out[None], positions[None])
    batch, tokens, heads, dim = given.shape
    half = rotary_dim // 2
    rope_kernel[(tokens, heads, batch)](
        given, result, cos, sin, places, *given.stride(), *result.stride()[:3], *places.stride(), *cos.stride(),
        *sin.stride(), HALF=half, D=dim, BLOCK_HALF=triton.next_power_of_2(half), BLOCK_D=schedule.padded(dim),
        INTERLEAVED=interleaved, INVERSE=inverse, num_warps=1, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out

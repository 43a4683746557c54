"""Rotary embedding: fp32 arithmetic, one rounding, and its inverse, which is the gradient.

The rotation is one device function. The kernel here applies it to a tensor; the attention kernels apply it
to the query tile they load and to the gradient tiles they store, so both give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_attn_plugin.kernels import schedule
from rl_attn_plugin.kernels.launch import launch
from rl_attn_plugin.kernels.tiles import INDEX_TENSORS
from rl_attn_plugin.types import Rope

_ROWS = 32  # (token, head) pairs of a program


@triton.jit
def _partner(HALF: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of each channel: its pair's other channel, its table column, whether it comes first, whether it turns."""
    d = tl.arange(0, BLOCK_D)
    if INTERLEAVED:
        first = d % 2 == 0
        column = d // 2
        other = tl.where(first, d + 1, d - 1)
    else:
        first = d < HALF
        column = tl.where(first, d, d - HALF)
        other = tl.where(first, d + HALF, d - HALF)
    turns = d < 2 * HALF
    return tl.where(turns, other, d), column, first, turns


@triton.jit
def _turn(
    x, y, inside, place, Cos, Sin, cos_p, cos_d, sin_p, sin_d,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """fp32 ``[rows, BLOCK_D]``: x rotated, where y holds the partner channels of x. Not rounded."""
    _, column, first, turns = _partner(HALF, BLOCK_D, INTERLEAVED)
    known = inside[:, None] & turns[None, :]
    place = place.to(tl.int64)[:, None]
    cos = tl.load(Cos + place * cos_p + (column * cos_d)[None, :], mask=known, other=1.0)
    sin = tl.load(Sin + place * sin_p + (column * sin_d)[None, :], mask=known, other=0.0)
    if INVERSE:
        sin = -sin
    crossed = y * sin
    # the contraction is written out, so that every kernel that inlines this gives the same bits
    turned = tl.fma(x, cos, tl.where(first[None, :], -crossed, crossed))
    return tl.where(turns[None, :], turned, x)


@triton.jit
def load_turned_rows(
    Base, offset, stride_d, inside, place, Cos, Sin, cos_p, cos_d, sin_p, sin_d,
    HALF: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """A ``[rows, BLOCK_D]`` tile rotated and rounded to the dtype it has in memory.

    ``offset`` (int64) and ``place`` (row of the tables) are per row; rows outside are 0.
    """
    d = tl.arange(0, BLOCK_D)
    other, _, _, _ = _partner(HALF, BLOCK_D, INTERLEAVED)
    keep = inside[:, None] & (d < DIM)[None, :]
    x = tl.load(Base + offset[:, None] + (d * stride_d)[None, :], mask=keep, other=0.0)
    y = tl.load(Base + offset[:, None] + (other * stride_d)[None, :], mask=keep, other=0.0)
    turned = _turn(
        x.to(tl.float32), y.to(tl.float32), inside, place, Cos, Sin, cos_p, cos_d, sin_p, sin_d,
        HALF, BLOCK_D, INTERLEAVED, INVERSE,
    )  # fmt: skip
    return turned.to(Base.dtype.element_ty)


@triton.jit
def turn_back(
    x, inside, place, Cos, Sin, cos_p, cos_d, sin_p, sin_d, dtype: tl.constexpr,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient ``[ROWS, BLOCK_D]`` of what was rotated, from that of the rotated; both rounded to ``dtype``."""
    x = x.to(dtype).to(tl.float32)
    other, _, _, _ = _partner(HALF, BLOCK_D, INTERLEAVED)
    y = tl.gather(x, tl.broadcast_to(other[None, :], (ROWS, BLOCK_D)), 1)
    return _turn(x, y, inside, place, Cos, Sin, cos_p, cos_d, sin_p, sin_d, HALF, BLOCK_D, INTERLEAVED, True)


@triton.jit(do_not_specialize=["rows", "heads"], do_not_specialize_on_alignment=INDEX_TENSORS)
def rope_kernel(
    X, Out, Cos, Sin, Places, rows, heads, x_b, x_t, x_h, x_d, out_b, out_t, out_h, places_b, places_t, cos_p, cos_d,
    sin_p, sin_d, HALF: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Some (token, head) rows of one sequence."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    inside = row < rows
    t = row // heads
    head = row % heads
    place = tl.load(Places + b * places_b + t * places_t, mask=inside, other=0)
    turned = load_turned_rows(
        X + b * x_b, t * x_t + head * x_h, x_d, inside, place, Cos, Sin, cos_p, cos_d, sin_p, sin_d,
        HALF, D, BLOCK_D, INTERLEAVED, INVERSE,
    )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    target = Out + b * out_b + (t * out_t + head * out_h)[:, None] + d[None, :]
    tl.store(target, turned, mask=inside[:, None] & (d < D)[None, :])


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
    arguments = {
        "X": given, "Out": result, "Cos": cos, "Sin": sin, "Places": places, "rows": tokens * heads, "heads": heads,
        **dict(zip(("x_b", "x_t", "x_h", "x_d"), given.stride(), strict=True)),
        **dict(zip(("out_b", "out_t", "out_h"), result.stride()[:3], strict=True)),
        **dict(zip(("places_b", "places_t"), places.stride(), strict=True)),
        **dict(zip(("cos_p", "cos_d"), cos.stride(), strict=True)),
        **dict(zip(("sin_p", "sin_d"), sin.stride(), strict=True)),
        "HALF": rotary_dim // 2, "D": dim, "BLOCK_D": schedule.padded(dim), "ROWS": _ROWS, "INTERLEAVED": interleaved,
        "INVERSE": inverse,
    }  # fmt: skip
    launch(rope_kernel, (schedule.cdiv(tokens * heads, _ROWS), batch), arguments, warps=4, stages=1)
    return out


def turn(x: Tensor, rope: Rope, positions: Tensor | None) -> Tensor:
    """``x`` rotated by a resolved `Rope`, at other positions than its own."""
    assert positions is not None and rope.rotary_dim is not None
    return apply_rope(
        x, rope.cos, rope.sin, positions, interleaved=rope.interleaved, rotary_dim=rope.rotary_dim, inverse=False
    )  # fmt: skip


def rope_arguments(rope: Rope | None, positions: Tensor | None) -> dict[str, Any]:
    """What a kernel with a rotation inside is told, by name; ``HALF`` 0 is none."""
    if rope is None or positions is None:
        strides = dict.fromkeys(("cos_p", "cos_d", "sin_p", "sin_d", "places_b", "places_t"), 0)
        return {"Cos": None, "Sin": None, "Places": None, "HALF": 0, "INTERLEAVED": False, **strides}
    assert rope.rotary_dim is not None
    batch, token = (0, *positions.stride())[-2:]
    return {
        "Cos": rope.cos, "Sin": rope.sin, "Places": positions, "HALF": rope.rotary_dim // 2,
        "INTERLEAVED": rope.interleaved, "cos_p": rope.cos.stride(0), "cos_d": rope.cos.stride(1),
        "sin_p": rope.sin.stride(0), "sin_d": rope.sin.stride(1), "places_b": batch, "places_t": token,
    }  # fmt: skip

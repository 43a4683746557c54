"""Row-wise reductions with an order of summation that the width alone decides: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_attn_plugin.kernels.launch import launch

_BLOCK = 1024


@triton.jit
def _moments(X, width, BLOCK: tl.constexpr):
    """Sum and sum of squares of a contiguous row: lanes first, then the tree of `tl.sum`."""
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for at in range(0, width, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(X + i, mask=i < width, other=0.0).to(tl.float32)
        total += x
        squares = tl.fma(x, x, squares)
    return tl.sum(total, 0), tl.sum(squares, 0)


@triton.jit(do_not_specialize=["width"])
def sum_kernel(X, Out, width, factor, BLOCK: tl.constexpr):
    """``factor * sum`` of a row."""
    row = tl.program_id(0).to(tl.int64)
    total, _ = _moments(X + row * width, width, BLOCK)
    tl.store(Out + row, (total * factor).to(Out.dtype.element_ty))


@triton.jit(do_not_specialize=["width"])
def softmax_kernel(X, Out, width, LOG: tl.constexpr, BLOCK: tl.constexpr):
    """Softmax or log-softmax of a row, in fp32."""
    row = tl.program_id(0).to(tl.int64)
    X += row * width
    Out += row * width
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    for at in range(0, width, BLOCK):
        i = at + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.load(X + i, mask=i < width, other=float("-inf")).to(tl.float32))
    top = tl.max(peak, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, width, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(X + i, mask=i < width, other=float("-inf")).to(tl.float32)
        total += tl.exp(x - top)
    mass = tl.sum(total, 0)
    shift = top + tl.log(mass)
    for at in range(0, width, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(X + i, mask=i < width, other=0.0).to(tl.float32)
        if LOG:
            y = x - shift
        else:
            y = tl.exp(x - top) / mass
        tl.store(Out + i, y.to(Out.dtype.element_ty), mask=i < width)


@triton.jit(do_not_specialize=["width"])
def norm_kernel(X, Weight, Bias, Out, Mean, Rstd, width, eps, CENTER: tl.constexpr, BLOCK: tl.constexpr):
    """Layer norm, or RMS norm without ``CENTER``, of a row."""
    row = tl.program_id(0).to(tl.int64)
    X += row * width
    Out += row * width
    total, squares = _moments(X, width, BLOCK)
    mean = 0.0
    if CENTER:
        mean = total / width
        spread = tl.zeros([BLOCK], tl.float32)
        for at in range(0, width, BLOCK):
            i = at + tl.arange(0, BLOCK)
            x = tl.load(X + i, mask=i < width, other=0.0).to(tl.float32)
            d = tl.where(i < width, x - mean, 0.0)
            spread = tl.fma(d, d, spread)
        squares = tl.sum(spread, 0)
        tl.store(Mean + row, mean)
    rstd = 1.0 / tl.sqrt(squares / width + eps)
    tl.store(Rstd + row, rstd)
    for at in range(0, width, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < width
        y = (tl.load(X + i, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
        if Weight is not None:
            y = y * tl.load(Weight + i, mask=inside, other=0.0).to(tl.float32)
        if Bias is not None:
            y = y + tl.load(Bias + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(Out + i, y.to(Out.dtype.element_ty), mask=inside)


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    width = x.shape[-1]
    flat = x.contiguous().view(-1, width)
    return flat, flat.shape[0], width


def _block(width: int) -> int:
    return min(_BLOCK, max(16, triton.next_power_of_2(width)))


def row_sum(x: Tensor, factor: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """``factor * x.sum(-1)``, summed in fp32.

    Args:
        x: ``[.., W]``, W at least 1.
        factor: 1 for a sum, 1 / W for a mean.
        dtype: of the result, default x's.
    """
    flat, rows, width = _rows(x)
    out = torch.empty(x.shape[:-1], dtype=dtype or x.dtype, device=x.device)
    if rows:
        arguments = {"X": flat, "Out": out, "width": width, "factor": float(factor), "BLOCK": _block(width)}
        launch(sum_kernel, (rows,), arguments, warps=4, stages=1)
    return out


def softmax(x: Tensor, *, log: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax or log-softmax over the last dim ``[.., W]``, computed in fp32."""
    flat, rows, width = _rows(x)
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    if rows:
        arguments = {"X": flat, "Out": out, "width": width, "LOG": log, "BLOCK": _block(width)}
        launch(softmax_kernel, (rows,), arguments, warps=4, stages=1)
    return out


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm (``center``) or RMS norm over the last dim.

    Args:
        x: ``[.., W]``.
        weight: ``[W]`` or None.
        bias: ``[W]`` or None.
        eps: added to the mean square.
        center: subtract the mean.

    Returns:
        The result, and fp32 mean and reciprocal deviation of each row, ``[.., 1]``.
    """
    flat, rows, width = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = torch.zeros(2, *x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if rows:
        arguments = {
            "X": flat, "Weight": None if weight is None else weight.contiguous(),
            "Bias": None if bias is None else bias.contiguous(), "Out": out, "Mean": mean, "Rstd": rstd, "width": width,
            "eps": float(eps), "CENTER": center, "BLOCK": _block(width),
        }  # fmt: skip
        launch(norm_kernel, (rows,), arguments, warps=4, stages=1)
    return out, mean, rstd

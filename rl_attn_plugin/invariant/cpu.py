"""Row-invariant replacements on a CPU.

A matrix product takes other code for other numbers of rows, and then sums in another order. Here rows always come in
tiles of 16, the last one padded, so that every product has one shape. (Seen on x86 with AVX-512 and AMX: tiles of 16
rows give a row the same bits in fp32 and bf16 wherever it lies, plain products do not below 64 rows in fp32 and at any
number in bf16.)

Some elementwise functions round otherwise in the scalar code that finishes a row than in the vector code before it:
which one an element meets depends on its place in the whole tensor. They are put together from functions that do not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 16


def mm(a: Tensor, b: Tensor) -> Tensor:
    """``a [M, K] @ b [K, N]``, rows of a in tiles."""
    return _by_tiles(a, b, lambda tile, _: torch.mm(tile, b))


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * bias + alpha * (a @ b)``; a bias of ``[M, N]`` is cut with the rows."""
    if bias.dim() < 2 or bias.shape[0] == 1:
        return _by_tiles(a, b, lambda tile, _: torch.addmm(bias, tile, b, beta=beta, alpha=alpha))
    padded = _padded(bias)
    return _by_tiles(
        a, b, lambda tile, at: torch.addmm(padded[at : at + ROWS], tile, b, beta=beta, alpha=alpha)
    )


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """``a [B, M, K] @ b [B, K, N]``, one matrix after the other."""
    if not a.shape[0]:
        return torch.bmm(a, b)
    return torch.stack([mm(x, y) for x, y in zip(a, b, strict=True)])


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * bias + alpha * (a @ b)``, one matrix after the other."""
    bias = bias.expand(a.shape[0], a.shape[1], b.shape[2])
    if not a.shape[0]:
        return torch.baddbmm(bias, a, b, beta=beta, alpha=alpha)
    return torch.stack([addmm(z, x, y, beta=beta, alpha=alpha) for z, x, y in zip(bias, a, b, strict=True)])


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in fp32."""
    wide = _wide(x)
    return torch.reciprocal(1 + torch.exp(-wide)).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in fp32, rounded once."""
    wide = _wide(x)
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """log(1 + exp(beta x)) / beta, x itself above the threshold."""
    wide = _wide(x) * beta
    soft = torch.log1p(torch.exp(wide.clamp(max=threshold))) / beta
    return torch.where(wide > threshold, wide / beta, soft).to(x.dtype)


def exp2(x: Tensor) -> Tensor:
    """2^x as exp(x ln 2) in fp64, rounded once; fp64 itself stays with torch's own."""
    return torch.exp(x.double() * 0.6931471805599453).to(x.dtype)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x), both correctly rounded in fp32."""
    return torch.reciprocal(torch.sqrt(_wide(x))).to(x.dtype)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """grad * s * (1 + x (1 - s)) with s = sigmoid(x)."""
    wide = _wide(x)
    s = sigmoid(wide)
    return (_wide(grad) * s * (1 + wide * (1 - s))).to(x.dtype)


def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    """grad * sigmoid(beta x), grad itself above the threshold."""
    wide = _wide(x) * beta
    return torch.where(wide > threshold, _wide(grad), _wide(grad) * sigmoid(wide)).to(x.dtype)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x times the normal distribution's integral, by erf, or by tanh as asked for."""
    if approximate != "tanh":
        return torch.nn.functional.gelu(x)
    wide = _wide(x)
    return (0.5 * wide * (1 + torch.tanh(_bent(wide)))).to(x.dtype)


def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """The gradient of `gelu`."""
    if approximate != "tanh":
        return torch.ops.aten.gelu_backward(grad, x)
    wide = _wide(x)
    t = torch.tanh(_bent(wide))
    slope = _GELU_SCALE * (1 + 3 * _GELU_CUBE * wide * wide)
    return (_wide(grad) * (0.5 * (1 + t) + 0.5 * wide * (1 - t * t) * slope)).to(x.dtype)


# Hendrycks and Gimpel 2016, Gaussian Error Linear Units: sqrt(2 / pi) and the weight of the cube.
_GELU_SCALE = 0.7978845608028654
_GELU_CUBE = 0.044715


def _bent(x: Tensor) -> Tensor:
    return _GELU_SCALE * (x + _GELU_CUBE * x * x * x)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _padded(x: Tensor) -> Tensor:
    """Rows up to a whole tile, contiguous."""
    short = -x.shape[0] % ROWS
    return torch.nn.functional.pad(x, (0, 0, 0, short)) if short else x.contiguous()


def _by_tiles(a: Tensor, b: Tensor, product: Callable[[Tensor, int], Tensor]) -> Tensor:
    rows = a.shape[0]
    if rows == 0:
        return a.new_empty(0, b.shape[1])
    padded = _padded(a)
    tiles = [product(padded[at : at + ROWS], at) for at in range(0, padded.shape[0], ROWS)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:rows]

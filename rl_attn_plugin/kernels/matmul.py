"""A matrix product with one order of summation: a row's bits do not depend on the number of rows.

Every element is one chain of products over ascending k, in fp32, without a split of K. Tiles of rows and columns may differ:
they do not touch the chain. fp32 has no tensor cores to give the chain its shape, so there the tile is one and the same for
every product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_attn_plugin.kernels import schedule
from rl_attn_plugin.kernels.launch import launch
from rl_attn_plugin.kernels.tiles import UPCAST

_BLOCK_K = 64
_GROUP = 8  # row tiles that share a stretch of columns, so that both stay in L2


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    A, B, Bias, Out, rows, columns, depth, alpha, beta, a_b, a_m, a_k, b_b, b_k, b_n, bias_b, bias_m, bias_n, out_b,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """One tile of ``alpha * A @ B + beta * Bias``."""
    batch = tl.program_id(1).to(tl.int64)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    pid = tl.program_id(0)
    band = pid // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    tile_m = band * GROUP + pid % (GROUP * tiles_n) % height
    tile_n = pid % (GROUP * tiles_n) // height

    m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    in_m = m < rows
    in_n = n < columns
    # columns past the end read the first one, their results are not stored; rows past the end read nothing, since few
    # rows in a tile would all read the same line
    a_at = A + batch * a_b + m[:, None] * a_m + k[None, :] * a_k
    b_at = B + batch * b_b + k[:, None] * b_k + tl.where(in_n, n, 0)[None, :] * b_n
    compute = tl.float32 if UPCAST else A.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            a = tl.load(a_at, mask=in_m[:, None], other=0.0)
            b = tl.load(b_at)
        else:
            a = tl.load(a_at, mask=in_m[:, None] & (k0 + k < depth)[None, :], other=0.0)
            b = tl.load(b_at, mask=(k0 + k < depth)[:, None], other=0.0)
        if FP32:
            # a sum of the steps' own sums: one long chain would round too often. Written with alpha, because a bare
            # addition would be made part of the chain again
            acc = tl.fma(tl.dot(a, b, input_precision="ieee"), alpha, acc)
        else:
            acc = tl.dot(a.to(compute), b.to(compute), acc, input_precision="ieee")
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    if not FP32:
        acc = acc * alpha
    keep = in_m[:, None] & in_n[None, :]
    if Bias is not None:
        at = Bias + batch * bias_b + m[:, None] * bias_m + n[None, :] * bias_n
        acc = tl.fma(tl.load(at, mask=keep, other=0.0).to(tl.float32), beta, acc)
    target = Out + batch * out_b + m[:, None] * columns + n[None, :]
    tl.store(target, acc.to(Out.dtype.element_ty), mask=keep)


def matmul(
    a: Tensor, b: Tensor, bias: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """``alpha * (a @ b) + beta * bias``, rounded once.

    Args:
        a: ``[M, K]`` or ``[B, M, K]``, any strides.
        b: ``[K, N]`` or ``[B, K, N]`` of the same dtype, any strides.
        bias: broadcasts to the result.
        alpha: of the product.
        beta: of the bias.

    Returns:
        Contiguous ``[M, N]`` or ``[B, M, N]``.
    """
    flat = a.dim() == 2
    if flat:
        a, b = a[None], b[None]
    batch, rows, depth = a.shape
    columns = b.shape[2]
    out = torch.empty(batch, rows, columns, dtype=a.dtype, device=a.device)
    if bias is not None:
        bias = bias.expand(batch, rows, columns)
    if out.numel():
        block_m, block_n, warps, stages = _tile(a.dtype, rows)
        grid = (schedule.cdiv(rows, block_m) * schedule.cdiv(columns, block_n), batch)
        strides = (0, 0, 0) if bias is None else bias.stride()
        arguments = {
            "A": a, "B": b, "Bias": bias, "Out": out, "rows": rows, "columns": columns, "depth": depth,
            "alpha": float(alpha), "beta": float(beta), "out_b": rows * columns,
            **dict(zip(("a_b", "a_m", "a_k"), a.stride(), strict=True)),
            **dict(zip(("b_b", "b_k", "b_n"), b.stride(), strict=True)),
            **dict(zip(("bias_b", "bias_m", "bias_n"), strides, strict=True)),
            "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": _BLOCK_K if a.dtype != torch.float32 else 32,
            "GROUP": _GROUP, "EVEN_K": depth % _BLOCK_K == 0, "STAGES": stages, "FP32": a.dtype == torch.float32,
        }  # fmt: skip
        launch(matmul_kernel, grid, arguments, warps=warps, stages=stages)
    return out[0] if flat else out


def _tile(dtype: torch.dtype, rows: int) -> tuple[int, int, int, int]:
    """Rows, columns, warps and stages of a tile. fp32 has one, see above."""
    if dtype == torch.float32:
        return 32, 64, 4, 3
    if rows <= 64:
        return 64, 32, 4, 6
    if rows <= 256:
        return 64, 128, 4, 4
    return 128, 256, 8, 3

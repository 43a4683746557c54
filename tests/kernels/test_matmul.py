"""The row-invariant products and row functions: right, and the same bits for a row alone, in few, and in many."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rl_attn_plugin.kernels.matmul import matmul
from rl_attn_plugin.kernels.rows import norm, row_sum, softmax


def operand(rows: int, columns: int, dtype: torch.dtype, device: torch.device, turned: bool) -> Tensor:
    if turned:
        return torch.randn(columns, rows, device=device).to(dtype).t()
    return torch.randn(rows, columns, device=device).to(dtype)


def check_product(
    rows: int, depth: int, columns: int, dtype: torch.dtype, device: torch.device, *, turned: bool, bias: bool
) -> None:  # fmt: skip
    a = operand(rows, depth, dtype, device, False)
    b = operand(depth, columns, dtype, device, turned) * depth**-0.5
    c = torch.randn(columns, device=device).to(dtype) if bias else None
    out = matmul(a, b, c, alpha=0.5, beta=2.0)
    exact = 0.5 * (a.double() @ b.double()) + (2 * c.double() if c is not None else 0)
    plain = (0.5 * (a @ b).double() + (2 * c.double() if c is not None else 0)).to(dtype).double()
    rounding = torch.finfo(dtype).eps * exact.norm()
    assert (out.double() - exact).norm() <= 2 * (plain - exact).norm() + rounding
    for begin, count in (
        (0, 1),
        (rows // 2, 1),
        (rows // 3, min(7, rows)),
        (0, min(100, rows)),
        (0, rows // 2 + 1),
    ):
        part = a[begin : begin + count]
        assert torch.equal(matmul(part, b, c, alpha=0.5, beta=2.0), out[begin : begin + part.shape[0]]), (
            begin,
            count,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(70, 100, 90), (33, 64, 33), (5, 17, 1)])
def test_products(rows: int, depth: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(rows)
    check_product(rows, depth, columns, dtype, device, turned=bool(rows % 2), bias=columns == 90)


def test_batches_and_nothing(device: torch.device) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 20, 40, device=device), torch.randn(3, 40, 9, device=device)
    out = matmul(a, b)
    torch.testing.assert_close(out, torch.bmm(a, b), rtol=1e-5, atol=1e-5)
    assert torch.equal(out[1], matmul(a[1], b[1]))
    shared = matmul(a, b[:1].expand(3, -1, -1))
    assert torch.equal(shared[2], matmul(a[2], b[0]))
    assert matmul(a[0][:0], b[0]).shape == (0, 9)
    assert not matmul(a[0][:, :0], b[0][:0]).any()  # an empty sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 100, 1500])
def test_row_functions(width: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(width)
    x = (torch.randn(5, 6, width, device=device) * 3).to(dtype)
    w = torch.randn(width, device=device).to(dtype)
    ways = {
        "sum": (lambda x: row_sum(x), lambda x: x.sum(-1)),
        "mean": (lambda x: row_sum(x, 1 / width), lambda x: x.mean(-1)),
        "softmax": (lambda x: softmax(x, log=False), lambda x: x.softmax(-1)),
        "log_softmax": (lambda x: softmax(x, log=True), lambda x: x.log_softmax(-1)),
        "layer_norm": (
            lambda x: norm(x, w, w, 1e-5, center=True)[0],
            lambda x: torch.nn.functional.layer_norm(x, (width,), w.to(x.dtype), w.to(x.dtype), 1e-5),
        ),
        "rms_norm": (
            lambda x: norm(x, w, None, 1e-6, center=False)[0],
            lambda x: torch.nn.functional.rms_norm(x, (width,), w.to(x.dtype), 1e-6),
        ),
    }
    for name, (ours, theirs) in ways.items():
        got, exact, plain = ours(x), theirs(x.double()), theirs(x).double()
        rounding = torch.finfo(dtype).eps * exact.norm()
        assert (got.double() - exact).norm() <= 2 * (plain - exact).norm() + rounding, name
        assert torch.equal(ours(x[2:3, 4:5]), got[2:3, 4:5]), name
        assert torch.equal(ours(x[1:4]), got[1:4]), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_two_hundred_shapes(dtype: torch.dtype, device: torch.device) -> None:
    """Rows around every tile change; depths and columns that are no multiples of anything."""
    draw = random.Random(0)
    torch.manual_seed(0)
    for _ in range(200):
        rows = draw.choice([1, 63, 64, 65, 100, 255, 256, 257, 700, 2100])
        depth = draw.choice([64, 128, 576, 1536, draw.randrange(1, 2000)])
        columns = draw.choice([1, 32, 192, 576, draw.randrange(1, 3000)])
        check_product(
            rows, depth, columns, dtype, device, turned=draw.random() < 0.6, bias=draw.random() < 0.3
        )

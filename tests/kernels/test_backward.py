"""Gradients against fp64 autograd, and their determinism."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_attn_plugin.kernels.backward import attention_backward
from rl_attn_plugin.kernels.forward import attention_forward
from rl_attn_plugin.types import Layout, Options
from tests.kernels.worlds import make_options, oracle


def gradients(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: Options, sinks: Tensor | None, dout: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, lse, _ = attention_forward(
        q, k, v, layout, options, sinks=sinks, k_scale=None, v_scale=None, out=None, plan=None
    )
    found = attention_backward(dout, dlse, q, k, v, out, lse, layout, options, sinks=sinks)
    return tuple(x for x in found if x is not None)


def wanted(
    pieces: list[tuple[Tensor, Tensor, Tensor]], options: Options, sinks: Tensor | None, douts: list[Tensor],
    dlses: list[Tensor], dtype: torch.dtype, keeps: list[Tensor | None] | None = None, starts: list[int] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Concatenated dq, dk, dv over sequences, and dsinks, by autograd in ``dtype``."""
    leaf_sinks = None if sinks is None else sinks.to(dtype).requires_grad_()
    leaves, loss = [], torch.zeros((), dtype=dtype, device=pieces[0][0].device)
    for n, piece in enumerate(pieces):
        mine = [x.to(dtype).requires_grad_() for x in piece]
        leaves.append(mine)
        out, lse, _ = oracle(
            *mine, options, sinks=leaf_sinks, keep=keeps[n] if keeps else None, kv_start=starts[n] if starts else 0,
            dtype=dtype,
        )  # fmt: skip
        loss = loss + (out * douts[n].to(dtype)).sum()
        finite = torch.isfinite(lse)
        loss = loss + (torch.where(finite, lse, 0.0) * torch.where(finite, dlses[n].to(dtype), 0.0)).sum()
    every = [x for mine in leaves for x in mine] + ([] if leaf_sinks is None else [leaf_sinks])
    found = torch.autograd.grad(loss, every, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for g, x in zip(found, every, strict=True)]
    parts = [torch.cat(found[i : 3 * len(pieces) : 3]) for i in range(3)]
    return (*parts, *found[3 * len(pieces) :])


def cancellation(
    pieces: list[tuple[Tensor, Tensor, Tensor]], options: Options, sinks: Tensor, douts: list[Tensor], dlses: list[Tensor]
) -> float:  # fmt: skip
    """Norm over heads of the sum of the magnitudes whose signed sum is dsinks, ``exp(sink - lse) * delta``, in fp64."""
    total = torch.zeros_like(sinks, dtype=torch.float64)
    for piece, dout, dlse in zip(pieces, douts, dlses, strict=True):
        out, lse, _ = oracle(
            *(x.double() for x in piece), options, sinks=sinks.double(), keep=None, kv_start=0, dtype=torch.float64
        )  # fmt: skip
        delta = (out * dout.double()).sum(-1) - dlse.double().t()
        total += (torch.exp(sinks.double() - lse.t()) * delta).abs().sum(0)
    return float(total.norm())


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm().clamp_min(1e-30))


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"window_right": -1},
    "window": {"window_left": 9, "window_right": 4},
    "top-left": {"top_left": True},
    "softcap": {"softcap": 1.5},
    "negative-scale": {"scale": -0.3},
    "sinks": {"sinks": True},
    "everything": {"window_left": 12, "softcap": 2.0, "sinks": True},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_gradients(name: str, dtype: torch.dtype, device: torch.device) -> None:
    changes = dict(CASES[name])
    torch.manual_seed(len(name))
    sinks = torch.randn(4, device=device) if changes.pop("sinks", False) else None
    dim, v_dim = 24, 16
    options = make_options(dim, block_k=16, split_k=32, out_dtype=dtype, **changes)
    sizes = [(37, 37), (0, 5), (20, 33), (9, 0), (30, 11)]  # Sq > Sk and empty ones too
    pieces = [
        tuple(
            torch.randn(n, h, d, device=device).to(dtype)
            for n, h, d in ((a, 4, dim), (b, 2, dim), (b, 2, v_dim))
        )
        for a, b in sizes
    ]
    q, k, v = (
        torch.cat([p[i] for p in pieces] + [torch.full_like(pieces[0][i][:3], torch.nan)]) for i in range(3)
    )
    cu = [
        torch.tensor([0, *torch.tensor([s[i] for s in sizes]).cumsum(0).tolist()], dtype=torch.int32)
        for i in (0, 1)
    ]
    layout = Layout(500, 500, cu[0].to(device), cu[1].to(device))
    # a gradient with strides of its own; what lies in padding rows is arbitrary
    dout = torch.randn(v_dim, 4, q.shape[0], device=device).to(dtype).permute(2, 1, 0)
    dlse = torch.randn(4, q.shape[0], device=device)
    bounds = cu[0].tolist()
    douts = [dout[a:b] for a, b in pairwise(bounds)]
    dlses = [dlse[:, a:b] for a, b in pairwise(bounds)]
    got = gradients(q, k, v, layout, options, sinks, dout, dlse)
    exact = wanted(pieces, options, sinks, douts, dlses, torch.float64)
    plain = wanted(pieces, options, sinks, douts, dlses, dtype)
    for label, g, e, p in zip(("dq", "dk", "dv", "dsinks"), got, exact, plain, strict=False):
        g, rest = g[: e.shape[0]], g[e.shape[0] :]
        assert not rest.any(), label  # exact zeros, not NaN
        bound = 2 * error(p, e) + torch.finfo(dtype).eps
        assert error(g, e) <= bound, (label, error(g, e), bound)


@pytest.mark.parametrize("masked", [False, True])
def test_dense_gradients(masked: bool, device: torch.device) -> None:
    torch.manual_seed(5)
    options = make_options(32, block_k=16, split_k=32, out_dtype=torch.float32)
    q, k, v = (torch.randn(2, 40, h, 32, device=device) for h in (3, 1, 1))
    keep = torch.rand(2, 40, device=device) > 0.4 if masked else None
    dout = torch.randn(2, 40, 3, 32, device=device).transpose(1, 2).contiguous().transpose(1, 2)
    dlse = torch.randn(2, 3, 40, device=device)
    starts = torch.tensor([0, 21], dtype=torch.int32, device=device)
    layout = Layout(40, 40, key_padding_mask=keep, kv_start=starts)
    got = gradients(q, k, v, layout, options, None, dout, dlse)
    pieces = [(q[b], k[b], v[b]) for b in range(2)]
    keeps = None if keep is None else [keep[0], keep[1]]
    exact = wanted(pieces, options, None, list(dout), list(dlse), torch.float64, keeps, [0, 21])
    for g, e in zip(got, exact, strict=True):
        assert error(g.flatten(0, 1), e) < 1e-5


def test_a_sequence_keeps_its_gradients_in_any_packing(device: torch.device) -> None:
    torch.manual_seed(6)
    options = make_options(16, block_k=16, split_k=32, window_left=20, out_dtype=torch.float32)
    sizes = [33, 50, 17]
    q, k, v = (torch.randn(sum(sizes), h, 16, device=device) for h in (4, 2, 2))
    dout = torch.randn(sum(sizes), 4, 16, device=device)
    cu = torch.tensor([0, 33, 83, 100], dtype=torch.int32, device=device)
    together = gradients(q, k, v, Layout(50, 50, cu, cu), options, None, dout, None)
    alone_cu = torch.tensor([0, 50], dtype=torch.int32, device=device)
    alone = gradients(
        q[33:83], k[33:83], v[33:83], Layout(50, 50, alone_cu, alone_cu), options, None, dout[33:83], None
    )
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a[33:83], b)


BIG: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_left": 200},
    "softcap": {"softcap": 3.0, "window_right": -1},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_gradients_over_many_tiles_twenty_times(
    dim: int, v_dim: int, dtype: torch.dtype, name: str, device: torch.device
) -> None:
    """Accuracy where every walk has masked and unmasked blocks, three query heads a group, and no bit moves."""
    torch.manual_seed(dim)
    options = make_options(dim, out_dtype=dtype, block_k=32 if max(dim, v_dim) > 128 else 64, **BIG[name])
    sizes = [(700, 700), (333, 519)]
    pieces = [
        tuple(
            torch.randn(n, h, d, device=device).to(dtype)
            for n, h, d in ((a, 6, dim), (b, 2, dim), (b, 2, v_dim))
        )
        for a, b in sizes
    ]
    q, k, v = (torch.cat([p[i] for p in pieces]) for i in range(3))
    cu = [
        torch.tensor([0, sizes[0][i], sizes[0][i] + sizes[1][i]], dtype=torch.int32, device=device)
        for i in (0, 1)
    ]
    sinks = torch.randn(6, device=device)
    dout, dlse = (
        torch.randn(q.shape[0], 6, v_dim, device=device).to(dtype),
        torch.randn(6, q.shape[0], device=device),
    )
    bounds = [0, 700, 1033]
    douts = [dout[a:b] for a, b in pairwise(bounds)]
    dlses = [dlse[:, a:b] for a, b in pairwise(bounds)]
    layout = Layout(700, 700, *cu)
    got = gradients(q, k, v, layout, options, sinks, dout, dlse)
    exact = wanted(pieces, options, sinks, douts, dlses, torch.float64)
    plain = wanted(pieces, options, sinks, douts, dlses, dtype)
    cancelled = cancellation(pieces, options, sinks, douts, dlses) / float(exact[3].norm())
    for label, g, e, p in zip(("dq", "dk", "dv", "dsinks"), got, exact, plain, strict=True):
        # dsinks is fp32 and one sum over all rows, so what is rounded once is each of its terms
        rounding = torch.finfo(torch.float32).eps * cancelled if label == "dsinks" else torch.finfo(dtype).eps
        bound = 2 * error(p, e) + rounding
        assert error(g, e) <= bound, (label, error(g, e), bound)
    for _ in range(20):
        again = gradients(q, k, v, layout, options, sinks, dout, dlse)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))

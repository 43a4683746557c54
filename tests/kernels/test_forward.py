"""The forward against fp64, for every option and layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_attn_plugin.kernels.forward import attention_forward
from rl_attn_plugin.kernels.schedule import Tuning
from rl_attn_plugin.types import Layout, Options
from tests.kernels.worlds import make_options, oracle


def forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: Options, **given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    arguments: dict[str, Any] = {
        "sinks": None,
        "k_scale": None,
        "v_scale": None,
        "out": None,
        "plan": None,
    } | given
    return attention_forward(q, k, v, layout, options, **arguments)


def assert_close(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, options: Options, **given: Any
) -> None:
    """At most twice the error of the same formula in q's dtype, plus one rounding."""
    exact, exact_lse, _ = oracle(q, k, v, options, **given)
    plain, _, _ = oracle(q, k, v, options, **given, dtype=q.dtype)
    bound = 2 * (plain.double() - exact).abs().max() if exact.numel() else 0.0
    rounding = exact.abs() * torch.finfo(out.dtype).eps + 1e-6
    assert bool(((out.double() - exact).abs() <= bound + rounding).all()), (out.double() - exact).abs().max()
    assert torch.equal(torch.isneginf(lse), torch.isneginf(exact_lse))
    finite = torch.isfinite(exact_lse)
    torch.testing.assert_close(lse[finite].double(), exact_lse[finite], rtol=2e-6, atol=5e-6)


def cumulative(sizes: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=device)


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"window_right": -1},
    "window": {"window_left": 9, "window_right": 4},
    "top-left": {"top_left": True},
    "top-left-window": {"top_left": True, "window_left": 6},
    "softcap": {"softcap": 1.5},
    "negative-scale": {"scale": -0.3},
    "zero-scale": {"scale": 0.0},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grid", [False, True])
def test_packed(name: str, grid: bool, device: torch.device) -> None:
    torch.manual_seed(len(name))
    options = make_options(
        24, block_k=16, split_k=32, out_dtype=torch.float32, return_max_logits=True, **CASES[name]
    )
    sizes = [(18, 18), (0, 5), (6, 41), (3, 0), (17, 11)]  # Sq < Sk, Sq > Sk, nothing to ask, nothing to see
    pieces = [
        tuple(torch.randn(n, h, d, device=device) for n, h, d in ((a, 3, 24), (b, 1, 24), (b, 1, 16)))
        for a, b in sizes
    ]

    def nans(x: Tensor) -> Tensor:
        return torch.full_like(x, math.nan)

    # rows that no sequence owns hold NaN, before and after
    q, k, v = (
        torch.cat([nans(pieces[0][i][:2]), *(p[i] for p in pieces), nans(pieces[0][i][:3])])
        for i in range(3)
    )  # fmt: skip
    cu = [cumulative([s[i] for s in sizes], device) + 2 for i in (0, 1)]
    sinks = torch.randn(3, device=device) if name in ("softcap", "window") else None
    out, lse, top = forward(
        q, k, v, Layout(700, 90, cu[0], cu[1]), options, sinks=sinks, tuning=Tuning(grid=grid)
    )
    bounds = [int(x) for x in cu[0]]
    tops = []
    for a, b, piece in zip(bounds, bounds[1:], pieces, strict=False):
        assert_close(out[a:b], lse[:, a:b], *piece, options, sinks=sinks)
        tops.append(oracle(*piece, options)[2])
    torch.testing.assert_close(top.double(), torch.stack(tops).amax(0), rtol=1e-5, atol=1e-5)
    for rows in (slice(0, 2), slice(bounds[-1], None)):
        assert not out[rows].any() and bool(torch.isneginf(lse[:, rows]).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dense_with_masks_starts_and_strides(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(2)
    options = make_options(40, block_k=16, split_k=48, window_left=25, out_dtype=dtype)
    q = torch.randn(2, 4, 45, 80, device=device).to(dtype)[..., ::2].transpose(1, 2)
    k = torch.randn(45, 2, 2, 40, device=device).to(dtype).permute(1, 0, 2, 3)
    v = torch.randn(2, 45, 2, 48, device=device).to(dtype)
    keep = torch.rand(2, 45, device=device) > 0.3
    v[~keep] = math.nan
    starts = torch.tensor([0, 37], dtype=torch.int32, device=device)
    room = torch.full((2, 4, 45, 96), math.nan, dtype=dtype, device=device)
    target = room[..., 10:58].transpose(1, 2)
    out, lse, _ = forward(
        q, k, v, Layout(45, 45, key_padding_mask=keep, kv_start=starts), options, out=target
    )
    assert out.data_ptr() == target.data_ptr() and bool(room[..., :10].isnan().all())
    for b in range(2):
        value = torch.where(keep[b, :, None, None], v[b], 0.0)
        assert_close(out[b], lse[b], q[b], k[b], value, options, keep=keep[b], kv_start=int(starts[b]))


def test_seqused_leaves_padding_inside_each_sequence(device: torch.device) -> None:
    torch.manual_seed(3)
    options = make_options(16, block_k=16, split_k=32, out_dtype=torch.float32)
    q, k, v = (torch.randn(60, h, 16, device=device) for h in (2, 1, 1))
    cu = cumulative([20, 40], device)
    used_q, used_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([13, 7], [20, 33]))
    for x in (q, k, v):
        x[20 + 33 :] = math.nan
    for grid in (False, True):
        layout = Layout(20, 40, cu, cu, seqused_q=used_q, seqused_k=used_k)
        out, lse, _ = forward(
            q, k, v, layout, options, sinks=torch.zeros(2, device=device), tuning=Tuning(grid=grid)
        )
        for a, n, m in ((0, 13, 20), (20, 7, 33)):
            piece = (q[a : a + n], k[a : a + m], v[a : a + m])
            assert_close(
                out[a : a + n], lse[:, a : a + n], *piece, options, sinks=torch.zeros(2, device=device)
            )
        for a, b in ((13, 20), (27, 60)):
            assert not out[a:b].any() and bool(torch.isneginf(lse[:, a:b]).all())


@pytest.mark.parametrize("per_head", [False, True])
def test_e4m3_cache(per_head: bool, device: torch.device) -> None:
    torch.manual_seed(4)
    options = make_options(16, block_k=16, split_k=32, softcap=3.0, out_dtype=torch.float32)
    k_scale, v_scale = (torch.rand(2 if per_head else 1, device=device) + 0.5 for _ in range(2))
    caches = [torch.randn(8, 8, 2, 16, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    table = torch.tensor([[3, 1, 7, 0, 2, -1]], dtype=torch.int32, device=device)
    used = torch.tensor([37], dtype=torch.int32, device=device)
    q = torch.randn(3, 4, 16, device=device)
    for grid in (False, True):
        out, lse, _ = forward(
            q, *caches, Layout(3, 48, cumulative([3], device), seqused_k=used, block_table=table), options,
            k_scale=k_scale, v_scale=v_scale, tuning=Tuning(grid=grid),
        )  # fmt: skip
        k, v = (
            (c.float()[table[0, :5].long()].flatten(0, 1)[:37] * s.reshape(-1, 1))
            for c, s in zip(caches, (k_scale, v_scale), strict=True)
        )
        assert_close(out, lse, q, k, v, options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_accuracy(dim: int, v_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Promise 3 at sizes with several splits."""
    torch.manual_seed(dim)
    options = make_options(dim, block_k=32 if max(dim, v_dim) > 128 else 64, out_dtype=dtype)
    q, k, v = (torch.randn(1500, h, d, device=device).to(dtype) for h, d in ((4, dim), (2, dim), (2, v_dim)))
    out, lse, _ = forward(q[None], k[None], v[None], Layout(1500, 1500), options)
    assert_close(out[0], lse[0], q, k, v, options)


@pytest.mark.gpu
def test_offsets_over_two_to_the_31(device: torch.device) -> None:
    """Token strides that overflow 32 bits: the last sequence of a packed tensor of 2^31 elements and more."""
    tokens, heads, dim = 600_000, 32, 128
    options = make_options(dim)
    q = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=device)
    tail = torch.randn(700, heads, dim, device=device).bfloat16()
    q[-700:] = tail
    cu = torch.tensor([0, 1, tokens - 700, tokens], dtype=torch.int32, device=device)
    used = torch.tensor([1, 0, 700], dtype=torch.int32, device=device)
    layout = Layout(tokens, tokens, cu, cu, seqused_q=used, seqused_k=used)
    out, lse, _ = forward(q, q, q, layout, options)
    small = torch.tensor([0, 700], dtype=torch.int32, device=device)
    wanted, wanted_lse, _ = forward(tail, tail, tail, Layout(700, 700, small, small), options)
    assert torch.equal(out[-700:], wanted) and torch.equal(lse[:, -700:], wanted_lse)
    assert not out[1:-700].any()

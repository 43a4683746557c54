"""The torch.library side: opcheck, compilation, fakes, and what a call may not do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_attn_plugin import (
    FlashAttention,
    Rope,
    apply_rope,
    flash_attention,
    flash_attention_paged,
    flash_attention_varlen,
    merge_attention,
    plan_paged,
    write_kv_cache,
)
from rl_attn_plugin.ops import contracts
from rl_attn_plugin.types import Layout, Options
from tests.tensors import ints

OPTIONS = Options(0.25, -1, 0, False, 0.0, 16, 64, torch.float32, True)


def packed_arguments(grad: bool, *, rotate: bool = False) -> tuple[object, ...]:
    q, k, v = (torch.randn(9, h, 16, requires_grad=grad) for h in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=grad)
    layout = Layout(9, 9, ints(0, 4, 9), ints(0, 4, 9))
    angle, at = torch.outer(torch.arange(9.0), torch.rand(6)), torch.arange(9)
    rope = Rope(angle.cos(), angle.sin(), at, rotary_dim=12, positions_k=at.flip(0)) if rotate else None
    return (
        q, k, v, sinks, *contracts.layout_arguments(layout), *contracts.rope_arguments(rope), None, None, None, 0,
        *contracts.option_arguments(OPTIONS, "torch"),
    )  # fmt: skip


@pytest.mark.parametrize("rotate", [False, True])
def test_opcheck_forward(rotate: bool) -> None:
    torch.library.opcheck(torch.ops.rl_attn.attention_forward.default, packed_arguments(True, rotate=rotate))


def test_opcheck_forward_out() -> None:
    arguments = packed_arguments(False)
    torch.library.opcheck(
        torch.ops.rl_attn.attention_forward_out.default, (*arguments, torch.empty(9, 4, 16))
    )


@pytest.mark.parametrize("rotate", [False, True])
def test_opcheck_backward(rotate: bool) -> None:
    q, k, v, sinks, *rest = packed_arguments(False, rotate=rotate)
    out, lse, _ = torch.ops.rl_attn.attention_forward(q, k, v, sinks, *rest)
    before, options = rest[:15], rest[19:]  # layout and rotation; what follows the paged arguments
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(
            torch.ops.rl_attn.attention_backward.default,
            (torch.randn_like(out), dlse, q, k, v, out, lse, sinks, *before, *options),
        )


def test_opcheck_merge_cache_rope() -> None:
    outs, lses = torch.randn(3, 5, 2, 8, requires_grad=True), torch.randn(3, 2, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.rl_attn.merge_attention.default, (outs, lses, "torch"))
    k, cache = torch.randn(3, 2, 8), torch.zeros(4, 4, 2, 8)
    torch.library.opcheck(
        torch.ops.rl_attn.write_kv_cache.default,
        (k, k.clone(), cache, cache.clone(), ints(0, -1, 13), None, None, "torch"),
    )
    x = torch.randn(5, 2, 16, requires_grad=True)
    table = torch.randn(32, 4)
    torch.library.opcheck(
        torch.ops.rl_attn.apply_rope.default, (x, table, table, torch.arange(5), False, 8, False, "torch")
    )


def test_compiles_fullgraph_with_gradients_and_dynamic_lengths() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
        r = flash_attention_varlen(q, k, v, cu, cu, longest, longest)
        dense = flash_attention(q[None], k[None], v[None], window=(3, 0))
        return r.out.square().sum() + r.lse.sum() + dense.out.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (7, 12):
        q, k, v = (torch.randn(length, h, 16, requires_grad=True) for h in (4, 2, 2))
        cu = ints(0, 3, length)
        got = torch.autograd.grad(compiled(q, k, v, cu, length), (q, k, v))
        want = torch.autograd.grad(loss(q, k, v, cu, length), (q, k, v))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def test_out_argument_and_partials() -> None:
    torch.manual_seed(0)
    q, cache = torch.randn(3, 2, 16, dtype=torch.bfloat16), torch.randn(4, 4, 1, 16, dtype=torch.bfloat16)
    arguments = (q, cache, cache, ints(0, 1, 3), ints(9, 3), ints(2, 0, 3, 1, -1, -1).view(2, 3), 2, 9)
    plain = flash_attention_paged(*arguments)
    buffer = torch.full((3, 2, 16), torch.nan, dtype=torch.bfloat16)
    given = flash_attention_paged(*arguments, out=buffer)
    assert given.out is buffer and torch.equal(buffer, plain.out) and torch.equal(given.lse, plain.lse)
    plan = plan_paged(
        arguments[3], arguments[4], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.bfloat16
    )
    planned = flash_attention_paged(*arguments, plan=plan)
    assert torch.equal(planned.out, plain.out) and torch.equal(planned.lse, plain.lse)
    partial = flash_attention_paged(*arguments, out_dtype=torch.float32)
    assert partial.out.dtype == torch.float32
    assert torch.equal(partial.out.bfloat16(), plain.out)


def test_max_logits() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, h, 16) for h in (6, 2, 2))
    r = flash_attention(q, k, v, softcap=3.0, sinks=torch.full((6,), 50.0), return_max_logits=True)
    scores = torch.einsum("qhd,khd->hqk", q[0], k[0].repeat_interleave(3, 1)) * 0.25
    scores = (3.0 * torch.tanh(scores / 3.0)).masked_fill(~torch.ones(40, 40).tril().bool(), -torch.inf)
    torch.testing.assert_close(r.max_logits, scores.amax((1, 2)))
    assert flash_attention(q, k, v).max_logits is None


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_rope_rotates_complex_pairs(interleaved: bool, rotary_dim: int | None) -> None:
    torch.manual_seed(0)
    rotary = rotary_dim or 16
    angle = torch.outer(torch.arange(50.0), 10.0 ** -torch.arange(rotary // 2))
    positions = torch.tensor([0, 3, 7, 49, 3])
    rope = Rope(angle.cos(), angle.sin(), positions, interleaved=interleaved, rotary_dim=rotary_dim)
    x = torch.randn(5, 2, 16, requires_grad=True)
    turned = apply_rope(x, rope)
    pairs = x[..., :rotary].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    if not interleaved:
        pairs = pairs.transpose(-1, -2)
    as_complex = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones(5, 1, rotary // 2), angle[positions][:, None]
    )
    expected = torch.view_as_real(as_complex)
    expected = expected.flatten(-2) if interleaved else expected.transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(turned[..., :rotary], expected)
    assert torch.equal(turned[..., rotary:], x[..., rotary:])
    weight = torch.randn_like(x)
    (got,) = torch.autograd.grad(turned, x, weight)
    torch.testing.assert_close(
        (got * x).sum(), (weight * turned).sum()
    )  # a rotation is its own adjoint's inverse


def test_rope_inside_attention_and_cache_equals_rope_first() -> None:
    torch.manual_seed(0)
    angle = torch.outer(torch.arange(64.0), 10.0 ** -torch.arange(8))
    q, k, v = (torch.randn(20, h, 16, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    rope = Rope(angle.cos(), angle.sin(), torch.arange(20))
    cu = ints(0, 20)
    inside = flash_attention_varlen(q, k, v, cu, cu, 20, 20, rope=rope)
    first = flash_attention_varlen(apply_rope(q, rope), apply_rope(k, rope), v, cu, cu, 20, 20)
    assert torch.equal(inside.out, first.out) and torch.equal(inside.lse, first.lse)
    for a, b in zip(
        torch.autograd.grad(inside.out.float().sum(), (q, k, v)),
        torch.autograd.grad(first.out.float().sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(a, b)
    compiled = torch.compile(flash_attention_varlen, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, cu, cu, 20, 20, rope=rope).out, inside.out)
    caches = [torch.full((2, 16, 2, 16), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    with torch.no_grad():
        write_kv_cache(k, v, *caches, torch.arange(20), rope=rope)
        paged = flash_attention_paged(q, *caches, cu, ints(20), ints(0, 1).view(1, 2), 20, 20, rope=rope)
    assert torch.equal(paged.out, inside.out) and torch.equal(paged.lse, inside.lse)


def test_float8_cache() -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(20, 2, 16) for _ in range(2))
    k[0, 0, 0] = 1e6  # saturates instead of becoming NaN
    scale = torch.tensor([0.02, 0.05])
    caches = [torch.zeros(2, 16, 2, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
    write_kv_cache(k, v, *caches, torch.arange(20), k_scale=scale, v_scale=scale[:1])
    kept = [
        (cache.float().flatten(0, 1)[:20] * s.view(-1, 1))
        for cache, s in zip(caches, (scale, scale[:1]), strict=True)
    ]
    assert bool(torch.isfinite(kept[0]).all())
    torch.testing.assert_close(kept[1], v, atol=0.05, rtol=0.07)
    q = torch.randn(3, 4, 16)
    table = ints(0, 1).view(1, 2)
    got = flash_attention_paged(
        q, *caches, ints(0, 3), ints(20), table, 3, 20, k_scale=scale, v_scale=scale[:1]
    )
    want = flash_attention_varlen(q, *kept, ints(0, 3), ints(0, 20), 3, 20)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_merge_of_partials_is_the_whole() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(30, h, 16, dtype=torch.bfloat16) for h in (4, 2, 2))
    cu = ints(0, 30)
    whole = flash_attention_varlen(q, k, v, cu, cu, 30, 30, out_dtype=torch.float32)
    parts = [
        flash_attention_varlen(
            q, k[a:b], v[a:b], cu, ints(0, b - a), 30, b - a, kv_start=ints(a), causal_alignment="top_left",
            out_dtype=torch.float32,
        )
        for a, b in ((0, 7), (7, 16), (16, 30))
    ]  # fmt: skip
    merged = merge_attention(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))
    torch.testing.assert_close(merged.out, whole.out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(merged.lse, whole.lse, atol=1e-6, rtol=1e-6)


def test_module_picks_by_its_arguments() -> None:
    torch.manual_seed(0)
    core = FlashAttention(4, 16, 2, sinks=True, window=(8, 0))
    assert core.sinks is not None
    torch.nn.init.normal_(core.sinks)
    q, k, v = (torch.randn(1, 20, h, 16) for h in (4, 2, 2))
    dense = core(q, k, v)
    packed = core(q[0], k[0], v[0], ints(0, 20), ints(0, 20), 20, 20)
    assert torch.equal(dense.out[0], packed.out)
    with torch.no_grad():
        paged = core(
            q[0, 19:], k[0].view(5, 4, 2, 16), v[0].view(5, 4, 2, 16), ints(0, 1), ints(20),
            ints(*range(5))[None], 1, 20,
        )  # fmt: skip
    assert torch.equal(paged.out, packed.out[19:])
    dense.out.sum().backward()
    assert core.sinks.grad is not None and bool(core.sinks.grad.abs().sum() > 0)
    with pytest.raises(ValueError, match=r"q must end in \(4, 16\).*got \(1, 20, 2, 16\)"):
        core(k, k, v)

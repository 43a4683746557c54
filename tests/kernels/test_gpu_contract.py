"""What the public functions promise on a GPU beside numbers: no synchronisation, graphs, compilation, 64-bit offsets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from rl_attn_plugin import (
    flash_attention,
    flash_attention_paged,
    flash_attention_varlen,
    merge_attention,
    plan_paged,
    write_kv_cache,
)

pytestmark = pytest.mark.gpu


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Any synchronisation raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def packed(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(700, h, 128, device="cuda", dtype=dtype, requires_grad=True) for h in (8, 2, 2))
    return q, k, v, ints(0, 300, 300, 640, 700)


def test_forward_backward_and_cache_do_not_synchronise() -> None:
    q, k, v, cu = packed()
    slots = torch.arange(700, device="cuda")
    caches = [torch.full((50, 16, 2, 128), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    table = torch.arange(50, device="cuda", dtype=torch.int32)[None]
    one, length = ints(0, 1), ints(700)
    with no_synchronisation():
        result = flash_attention_varlen(q, k, v, cu, cu, 5000, 5000)
        torch.autograd.grad([result.out, result.lse], (q, k, v), [result.out.detach(), result.lse.detach()])
        write_kv_cache(k.detach(), v.detach(), *caches, slots)
        with torch.no_grad():
            flash_attention_paged(q[:1], *caches, one, length, table, 1, 800)
        merge_attention(torch.stack([result.out] * 2), torch.stack([result.lse] * 2))


def test_a_captured_decode_step_follows_its_lengths() -> None:
    """One graph, replayed while the sequences grow: bits of the full prefill at every length."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1500, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    full = flash_attention(q, k, v)
    caches = [x[0, :1488].view(93, 16, 2, 128).contiguous() for x in (k, v)]
    table = torch.arange(93, device="cuda", dtype=torch.int32)[None]
    row, length, cu = q[0, :1].clone(), ints(1), ints(0, 1)

    def step() -> tuple[Tensor, Tensor]:
        r = flash_attention_paged(row, *caches, cu, length, table, 1, 1488)
        return r.out, r.lse

    with torch.no_grad():
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = step()
        for n in (1, 63, 64, 65, 1023, 1024, 1025, 1488):
            row.copy_(q[0, n - 1 : n])
            length.fill_(n)
            graph.replay()
            assert torch.equal(out, full.out[0, n - 1 : n]) and torch.equal(lse, full.lse[0, :, n - 1 : n])


def test_a_plan_changes_no_bit() -> None:
    torch.manual_seed(0)
    lengths = [5000, 3, 70, 1, 900]
    every = [torch.randn(n, 2, 128, device="cuda", dtype=torch.bfloat16) for n in lengths]
    cache = torch.full((400, 16, 2, 128), torch.nan, device="cuda", dtype=torch.bfloat16)
    table = torch.full((5, 313), -1, dtype=torch.int32, device="cuda")
    page = 0
    for b, x in enumerate(every):
        count = -(-len(x) // 16)
        table[b, :count] = torch.arange(page, page + count, device="cuda")
        write_kv_cache(x, x, cache, cache.clone(), torch.arange(len(x), device="cuda") + page * 16)
        page += count
    q, cu, used = (
        torch.randn(5, 8, 128, device="cuda", dtype=torch.bfloat16),
        ints(0, 1, 2, 3, 4, 5),
        ints(*lengths),
    )
    with torch.no_grad():
        plain = flash_attention_paged(q, cache, cache, cu, used, table, 1, 5000)
        plan = plan_paged(cu, used, num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)
        planned = flash_attention_paged(q, cache, cache, cu, used, table, 1, 5000, plan=plan)
    assert torch.equal(plain.out, planned.out) and torch.equal(plain.lse, planned.lse)
    assert bool(torch.isfinite(plain.out).all())


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph_compilation(dynamic: bool) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        r = flash_attention_varlen(q, k, v, cu, cu, 512, 512)
        return r.out.float().square().sum() + r.lse[:, :300].sum()

    q, k, v, cu = packed()
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
    got = torch.autograd.grad(compiled(q, k, v, cu), (q, k, v))
    want = torch.autograd.grad(loss(q, k, v, cu), (q, k, v))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_offsets_past_two_to_the_31() -> None:
    """A cache of 2.6e9 elements, and the last pages of it."""
    pages, size = 10_100, 256
    cache = torch.empty(pages, size, 8, 128, device="cuda", dtype=torch.bfloat16)
    assert cache.numel() > 2**31
    k, v = (torch.randn(400, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(400, 8, 128, device="cuda", dtype=torch.bfloat16)
    v_cache = torch.empty_like(cache)
    slots = torch.arange(400, device="cuda") + (pages - 2) * size
    write_kv_cache(k, v, cache, v_cache, slots)
    table = ints(pages - 2, pages - 1)[None]
    with torch.no_grad():
        got = flash_attention_paged(q, cache, v_cache, ints(0, 400), ints(400), table, 400, 400)
        want = flash_attention(q[None], k[None], v[None])
    assert torch.equal(got.out, want.out[0]) and torch.equal(got.lse, want.lse[0])

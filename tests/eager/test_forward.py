"""``impl="torch"``: one schedule gives a row the same bits however it is computed, and the right numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from rl_attn_plugin import (
    AttentionOutput,
    Schedule,
    flash_attention,
    flash_attention_paged,
    flash_attention_varlen,
    write_kv_cache,
)
from rl_attn_plugin.reference import attention_reference
from tests.tensors import ints, offsets

SMALL_SPLITS = Schedule(block_k=16, split_k=64)  # several splits within test lengths
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(
    length: int, heads: int, kv_heads: int, dim: int, v_dim: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    return tuple(
        torch.randn(length, h, d, dtype=dtype) for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim))
    )


class Pages:
    """Several sequences' keys scattered over poisoned pages of one cache."""

    def __init__(self, kvs: list[tuple[Tensor, Tensor]], page_size: int, *, head_major: bool = False) -> None:
        counts = [-(-k.shape[0] // page_size) for k, _ in kvs]
        order = torch.randperm(sum(counts) + 3)
        self.table = torch.full((len(kvs), max(counts) + 2), -1, dtype=torch.int32)
        caches, used = [], 0
        for which in (0, 1):
            _, heads, dim = kvs[0][which].shape
            shape = (len(order), heads, page_size, dim) if head_major else (len(order), page_size, heads, dim)
            cache = torch.full(shape, torch.nan, dtype=kvs[0][which].dtype)
            caches.append(cache.transpose(1, 2) if head_major else cache)
        self.k, self.v = caches
        for b, (k, v) in enumerate(kvs):
            mine = order[used : used + counts[b]]
            used += counts[b]
            self.table[b, : counts[b]] = mine.int()
            index = torch.arange(k.shape[0])
            slots = mine[index // page_size] * page_size + index % page_size
            write_kv_cache(k, v, self.k, self.v, slots)


def same(got: AttentionOutput, want: AttentionOutput, rows: slice) -> None:
    """Bit equality of packed results with rows of a dense one of batch 1."""
    assert torch.equal(got.out, want.out[0, rows])
    assert torch.equal(got.lse, want.lse[0, :, rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim"), [(4, 4, 64, 64), (6, 2, 40, 40), (9, 3, 64, 64), (4, 1, 192, 128)]
)
@pytest.mark.parametrize("options", [{}, {"window": (37, 0)}, {"softcap": 5.0}, {"sinks": True}], ids=str)
def test_chunks_pages_and_decode_equal_full_prefill(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, v_dim: int, options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    length = 150
    q, k, v = make(length, heads, kv_heads, dim, v_dim, dtype)
    arguments = {"schedule": SMALL_SPLITS, **options}
    if options.get("sinks"):
        arguments["sinks"] = torch.randn(heads)
    full = flash_attention(q[None], k[None], v[None], **arguments)
    for page_size, head_major in ((1, False), (16, True), (17, False)):
        pages = Pages([(k, v)], page_size, head_major=head_major)
        for begin, end in ((0, 1), (0, 33), (33, 150), (63, 64), (64, 65), (100, 103), (149, 150)):
            got = flash_attention_paged(
                q[begin:end],
                pages.k,
                pages.v,
                ints(0, end - begin),
                ints(end),
                pages.table,
                150,
                999,
                **arguments,
            )
            same(got, full, slice(begin, end))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_mix_does_not_change_a_row(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    lengths, new = [130, 1, 77, 64, 65, 40], [1, 1, 30, 1, 64, 0]
    every = [make(n, 6, 2, 64, 64, dtype) for n in lengths]
    pages = Pages([(k, v) for _, k, v in every], 16)
    q = torch.cat([q[n - m :] for (q, _, _), n, m in zip(every, lengths, new, strict=True)])
    cu = offsets(new)
    got = flash_attention_paged(
        q, pages.k, pages.v, cu, ints(*lengths), pages.table, 64, 130, schedule=SMALL_SPLITS
    )
    for b, (q1, k, v) in enumerate(every):
        full = flash_attention(q1[None], k[None], v[None], schedule=SMALL_SPLITS)
        rows = slice(int(cu[b]), int(cu[b + 1]))
        same(AttentionOutput(got.out[rows], got.lse[:, rows]), full, slice(lengths[b] - new[b], lengths[b]))


def test_default_schedule_crosses_its_split() -> None:
    torch.manual_seed(2)
    q, k, v = make(1100, 2, 1, 64, 64, torch.bfloat16)
    full = flash_attention(q[None], k[None], v[None])
    pages = Pages([(k, v)], 256)
    for begin, end in ((1023, 1024), (1024, 1025), (1000, 1100)):
        got = flash_attention_paged(
            q[begin:end], pages.k, pages.v, ints(0, end - begin), ints(end), pages.table, 100, 1100
        )
        same(got, full, slice(begin, end))


def test_splits_at_absolute_positions_matter() -> None:
    """The control: other block boundaries are other bits, and the comparison sees it."""
    torch.manual_seed(3)
    q, k, v = make(150, 4, 4, 64, 64, torch.float32)
    full = flash_attention(q[None], k[None], v[None], schedule=SMALL_SPLITS)
    shifted = flash_attention_varlen(
        q[149:], k, v, ints(0, 1), ints(0, 150), 1, 150, kv_start=ints(7), schedule=SMALL_SPLITS
    )
    assert not torch.equal(shifted.out, full.out[0, 149:])
    torch.testing.assert_close(shifted.out, full.out[0, 149:])


@pytest.mark.parametrize("evicted", [1, 16, 50, 64, 100])
def test_kv_start_keeps_the_bits_of_a_window(evicted: int) -> None:
    torch.manual_seed(4)
    q, k, v = make(150, 4, 2, 64, 64, torch.bfloat16)
    window = (40, 0)
    full = flash_attention(q[None], k[None], v[None], window=window, schedule=SMALL_SPLITS)
    begin = evicted + 40
    got = flash_attention_varlen(
        q[begin:], k[evicted:], v[evicted:], ints(0, 150 - begin), ints(0, 150 - evicted), 150, 150,
        kv_start=ints(evicted), window=window, schedule=SMALL_SPLITS,
    )  # fmt: skip
    same(got, full, slice(begin, 150))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_left_padding_as_offsets_and_lengths(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    lengths, width = [20, 64, 1, 0], 64
    batch = [make(n, 4, 2, 64, 64, dtype) for n in lengths]
    padded = [torch.full((4, width, *x.shape[1:]), torch.nan, dtype=dtype) for x in batch[0]]
    for b, tensors in enumerate(batch):
        for row, x in zip(padded, tensors, strict=True):
            row[b, width - lengths[b] :] = x
    q, k, v = (x.flatten(0, 1) for x in padded)
    starts = [b * width + width - n for b, n in enumerate(lengths)]
    cu = ints(*starts, 4 * width)
    used = ints(*lengths)
    got = flash_attention_varlen(
        q, k, v, cu, cu, width, width, seqused_q=used, seqused_k=used, schedule=SMALL_SPLITS
    )
    covered = torch.zeros(4 * width, dtype=torch.bool)
    for b, (q1, k1, v1) in enumerate(batch):
        rows = slice(starts[b], starts[b] + lengths[b])
        covered[rows] = True
        if lengths[b]:
            full = flash_attention(q1[None], k1[None], v1[None], schedule=SMALL_SPLITS)
            same(AttentionOutput(got.out[rows], got.lse[:, rows]), full, slice(0, lengths[b]))
    assert torch.equal(got.out[~covered], torch.zeros_like(got.out[~covered]))
    assert bool((got.lse[:, ~covered] == -torch.inf).all())


def test_given_masks_equal_implied_ones() -> None:
    torch.manual_seed(6)
    q, k, v = (x[None] for x in make(90, 4, 2, 64, 64, torch.bfloat16))
    full = flash_attention(q, k, v, schedule=SMALL_SPLITS)
    masked = flash_attention(
        q, k, v, key_padding_mask=torch.ones(1, 90, dtype=torch.bool), schedule=SMALL_SPLITS
    )
    last = flash_attention(q[:, -1:], k, v, causal=False, schedule=SMALL_SPLITS)
    assert torch.equal(full.out, masked.out) and torch.equal(full.lse, masked.lse)
    assert torch.equal(last.out, full.out[:, -1:]) and torch.equal(last.lse, full.lse[..., -1:])


def test_head_subsets_keep_their_bits() -> None:
    torch.manual_seed(7)
    q, k, v = (x[None] for x in make(90, 8, 4, 64, 64, torch.bfloat16))
    full = flash_attention(q, k, v, schedule=SMALL_SPLITS)
    for part in range(4):
        rank = slice(2 * part, 2 * part + 2)
        one = flash_attention(
            q[:, :, rank], k[:, :, part : part + 1], v[:, :, part : part + 1], schedule=SMALL_SPLITS
        )
        assert torch.equal(one.out, full.out[:, :, rank]) and torch.equal(one.lse, full.lse[:, rank])
    single = flash_attention(q[:, :, 3:4], k[:, :, 1:2], v[:, :, 1:2], schedule=SMALL_SPLITS)
    assert torch.equal(single.out, full.out[:, :, 3:4]) and torch.equal(single.lse, full.lse[:, 3:4])


def test_threads_do_not_change_bits() -> None:
    torch.manual_seed(8)
    q, k, v = (x[None] for x in make(130, 6, 2, 64, 64, torch.float32))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(flash_attention(q, k, v, schedule=SMALL_SPLITS))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(other.out, results[0].out) and torch.equal(other.lse, results[0].lse)


CASES = [
    {"causal": False},
    {},
    {"causal_alignment": "top_left"},
    {"window": (16, 0)},
    {"window": (5, 9), "causal": False},
    {"window": (0, 0)},
    {"softcap": 3.0},
    {"sinks": True},
    {"scale": 0.3},
    {"window": (16, 0), "softcap": 2.0, "sinks": True},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize(("num_q", "num_k"), [(70, 70), (3, 70), (70, 3), (1, 64), (65, 0), (15, 17)])
def test_accuracy_against_fp64(
    dtype: torch.dtype, options: dict[str, object], num_q: int, num_k: int
) -> None:
    """Promise 3: twice the error of an independent low-precision run plus one rounding of the output."""
    torch.manual_seed(9)
    q, (_, k, v) = make(num_q, 6, 2, 40, 24, dtype)[0], make(num_k, 6, 2, 40, 24, dtype)
    arguments = dict(options)
    sinks = torch.randn(6) if arguments.pop("sinks", False) else None
    got = flash_attention(q[None], k[None], v[None], sinks=sinks, schedule=SMALL_SPLITS, **arguments)
    exact, exact_lse = attention_reference(q, k, v, sinks=sinks, **arguments)
    rough, rough_lse = attention_reference(q, k, v, sinks=sinks, dtype=torch.float32, **arguments)
    rounding = torch.finfo(dtype).eps * exact.abs().max() if exact.numel() else 0.0
    assert (got.out[0].double() - exact).abs().max() <= 2 * (rough.double() - exact).abs().max() + rounding
    finite = torch.isfinite(exact_lse)
    assert torch.equal(torch.isfinite(got.lse[0]), finite)
    error = (got.lse[0].double() - exact_lse)[finite].abs()
    if error.numel():
        allowed = 2 * (rough_lse.double() - exact_lse)[finite].abs().max()
        allowed = allowed + torch.finfo(torch.float32).eps * exact_lse[finite].abs().max().clamp(min=1)
        assert error.max() <= allowed


@pytest.mark.slow
def test_the_first_call_of_a_process_has_the_bits_of_the_second() -> None:
    """Two threads that initialise the maths library together once gave the first call other bits."""
    code = (
        "import torch\nfrom rl_attn_plugin import flash_attention\ntorch.manual_seed(0)\n"
        "q, k, v = (torch.randn(1, 300, h, 64) for h in (8, 2, 2))\n"
        "assert torch.equal(flash_attention(q, k, v).lse, flash_attention(q, k, v).lse)\n"
    )
    for _ in range(8):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "v_dim", "schedule"),
    [
        (torch.float16, 3, 1, 200, 200, Schedule(block_k=128, split_k=128)),
        (torch.float32, 2, 2, 64, 1, Schedule()),
        (torch.bfloat16, 1, 1, 256, 1, Schedule(block_k=128, split_k=128)),
    ],
)
def test_a_sequence_alone_has_the_bits_of_one_among_others(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, v_dim: int, schedule: Schedule
) -> None:
    """One tile of one head is a product of its own, which libraries compute by other code than a batch."""
    torch.manual_seed(5)
    q, k, v = make(6, heads, kv_heads, dim, v_dim, dtype)
    cu = ints(0, 2, 4, 6)
    options = {"scale": 0.3, "softcap": 0.5, "schedule": schedule, "out_dtype": torch.float32}
    packed = flash_attention_varlen(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=2, max_seqlen_k=2, causal=True, **options
    )
    for start in (0, 2, 4):
        rows = slice(start, start + 2)
        for head in range(kv_heads):
            group = slice(head * heads // kv_heads, (head + 1) * heads // kv_heads)
            one = slice(head, head + 1)
            alone = flash_attention(
                q[None, rows, group], k[None, rows, one], v[None, rows, one], causal=True, **options
            )
            assert torch.equal(alone.out[0], packed.out[rows, group])
            assert torch.equal(alone.lse[0], packed.lse[group, rows])

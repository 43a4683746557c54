"""Sequences with queries, keys and values, and every way of computing their attention rows.

`oracle` is fp64 autograd written plainly; it shares no code with the kernels.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.kernels import schedule
from rl_attn_plugin.kernels.forward import attention_forward
from rl_attn_plugin.types import Layout, Options

Rows = list[tuple[Tensor, Tensor]]  # for each piece: out [n, Hq, Dv], lse [Hq, n]
Piece = tuple[int, int, int]  # sequence, first query, end


def make_options(dim: int, **changes: Any) -> Options:
    base = Options(
        scale=dim**-0.5, window_left=-1, window_right=0, top_left=False, softcap=0.0, block_k=64, split_k=1024,
        out_dtype=torch.bfloat16, return_max_logits=False,
    )  # fmt: skip
    return replace(base, **changes)


def oracle(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, sinks: Tensor | None = None, keep: Tensor | None = None,
    kv_start: int = 0, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One sequence ``[S, H, D]``: out, lse ``[Hq, Sq]``, max_logits ``[Hq]``, in ``dtype``."""
    num_q, heads, _ = q.shape
    num_k, kv_heads, _ = k.shape
    group = heads // kv_heads
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * options.scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    i = torch.arange(num_q, device=q.device)[:, None]
    j = torch.arange(num_k, device=q.device)[None, :] + kv_start
    position = i if options.top_left else i + kv_start + num_k - num_q
    hidden = torch.zeros(num_q, num_k, dtype=torch.bool, device=q.device)
    if options.window_right >= 0:
        hidden |= j > position + options.window_right
    if options.window_left >= 0:
        hidden |= j < position - options.window_left
    if keep is not None:
        hidden |= ~keep[None, :]
    scores = scores.masked_fill(hidden, -math.inf)
    top = scores.amax((1, 2)) if num_q and num_k else scores.new_full((heads,), -math.inf)
    column = (
        scores.new_full((heads, num_q, 1), -math.inf) if sinks is None else sinks.to(dtype)[:, None, None]
    )
    scores = torch.cat((scores, column.expand(-1, num_q, 1)), 2)
    dead = torch.isinf(scores).all(2)
    weights = torch.where(dead[:, :, None], 0.0, scores.masked_fill(dead[:, :, None], 0.0).softmax(2))
    lse = torch.where(dead, -math.inf, scores.masked_fill(dead[:, :, None], 0.0).logsumexp(2))
    return torch.einsum("hij,jhd->ihd", weights[:, :, :-1], v), lse, top


@dataclass
class World:
    """Sequences (every query has its key: Sq = Sk) and the options of one attention layer."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    options: Options
    sinks: Tensor | None = None
    tuning: schedule.Tuning = field(default_factory=schedule.Tuning)

    @property
    def device(self) -> torch.device:
        return self.q[0].device

    def ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **given: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        arguments = {"sinks": self.sinks, "k_scale": None, "v_scale": None, "out": None, "plan": None} | given
        return attention_forward(q, k, v, layout, self.options, tuning=self.tuning, **arguments)

    def packed(self, order: list[int], *, slack: int = 1) -> Rows:
        """Whole sequences in one packed call; ``slack`` multiplies the host bounds."""
        q, k, v = (torch.cat([x[i] for i in order]) for x in (self.q, self.k, self.v))
        offsets = [0]
        for i in order:
            offsets.append(offsets[-1] + self.q[i].shape[0])
        longest = slack * max(self.q[i].shape[0] for i in order)
        cu = self.ints(offsets)
        out, lse, _ = self.call(q, k, v, Layout(longest, longest, cu, cu))
        return [(out[a:b], lse[:, a:b]) for a, b in pairwise(offsets)]

    def dense(self, i: int, *, masked: bool = False) -> Rows:
        """One sequence as a batch of one, with or without an all-True padding mask."""
        size = self.q[i].shape[0]
        keep = torch.ones(1, size, dtype=torch.bool, device=self.device) if masked else None
        out, lse, _ = self.call(
            self.q[i][None], self.k[i][None], self.v[i][None], Layout(size, size, key_padding_mask=keep)
        )
        return [(out[0], lse[0])]

    def paged(
        self, pieces: list[Piece], page: int, rng: random.Random, *, slack: int = 1, planned: bool = False,
        head_major: bool = False, evict: bool = False,
    ) -> Rows:  # fmt: skip
        """Pieces of sequences, queries ``[a, b)`` against keys ``[0, b)``, over shuffled pages full of NaN."""
        left = self.options.window_left
        starts = [max(a - left, 0) if evict and left >= 0 else 0 for _, a, _ in pieces]
        counts = [schedule.cdiv(b - start, page) for (_, _, b), start in zip(pieces, starts, strict=True)]
        pages = sum(counts) + 3
        free = list(range(pages))
        rng.shuffle(free)
        table = torch.full((len(pieces), max(counts) + 2), -7, dtype=torch.int32)
        caches = []
        for x in (self.k, self.v):
            _, heads, dim = x[0].shape
            shape = (pages, heads, page, dim) if head_major else (pages, page, heads, dim)
            cache = torch.full(shape, math.nan, dtype=x[0].dtype, device=self.device)
            caches.append(cache.transpose(1, 2) if head_major else cache)
        at = 0
        for n, ((i, _, b), start) in enumerate(zip(pieces, starts, strict=True)):
            mine = free[at : at + counts[n]]
            at += counts[n]
            table[n, : counts[n]] = torch.tensor(mine, dtype=torch.int32)
            slots = torch.arange(b - start)
            where = torch.tensor(mine, device=self.device)[(slots // page).to(self.device)]
            for cache, x in zip(caches, (self.k, self.v), strict=True):
                cache[where, (slots % page).to(self.device)] = x[i][start:b]
        q = torch.cat([self.q[i][a:b] for i, a, b in pieces])
        offsets = [0]
        for _, a, b in pieces:
            offsets.append(offsets[-1] + b - a)
        cu = self.ints(offsets)
        used = self.ints([b - start for (_, _, b), start in zip(pieces, starts, strict=True)])
        kv_start = self.ints(starts) if evict else None
        plan = None
        if planned:
            plan = schedule.plan_paged(
                cu, used, num_heads=q.shape[1], num_kv_heads=self.k[0].shape[1], head_dim=q.shape[2],
                v_head_dim=self.v[0].shape[2], dtype=q.dtype, split_k=self.options.split_k, kv_start=kv_start,
            )  # fmt: skip
        layout = Layout(
            slack * max(b - a for _, a, b in pieces), slack * max(b for _, _, b in pieces), cu,
            seqused_k=used, block_table=table.to(self.device), kv_start=kv_start,
        )  # fmt: skip
        out, lse, _ = self.call(q, caches[0], caches[1], layout, plan=plan)
        return [(out[a:b], lse[:, a:b]) for a, b in pairwise(offsets)]

    def heads(self, first: int, count: int) -> World:
        """The world of one tensor-parallel rank: ``count`` kv heads and their queries."""
        group = self.q[0].shape[1] // self.k[0].shape[1]
        mine, theirs = slice(first, first + count), slice(first * group, (first + count) * group)
        return replace(
            self,
            q=[x[:, theirs] for x in self.q], k=[x[:, mine] for x in self.k], v=[x[:, mine] for x in self.v],
            sinks=None if self.sinks is None else self.sinks[theirs].contiguous(),
        )  # fmt: skip


def random_world(
    rng: random.Random, device: torch.device, *, dims: list[tuple[int, int]], dtypes: list[torch.dtype],
    lengths: list[int], block_k: int | None = None, split_k: int | None = None,
) -> World:  # fmt: skip
    """A world with random heads, dims, dtype, window, softcap and sinks."""
    dim, v_dim = rng.choice(dims)
    dtype = rng.choice(dtypes)
    kv_heads = rng.choice([1, 2, 3])
    group = rng.choice([1, 2, 3, 4, 8])
    if kv_heads * group > 8:
        group = 2
    generator = torch.Generator(device=device).manual_seed(rng.randrange(1 << 30))

    def draw(n: int, h: int, d: int) -> Tensor:
        return torch.randn(n, h, d, generator=generator, device=device).to(dtype)

    options = make_options(
        dim,
        block_k=block_k or (32 if max(dim, v_dim) > 128 else 64),
        split_k=split_k or 1024,
        window_left=rng.choice([-1, -1, -1, 0, 17, 100, 700]),
        softcap=rng.choice([0.0, 0.0, 5.0]),
        out_dtype=rng.choice([dtype, dtype, torch.float32]),
    )
    sizes = [rng.choice(lengths) + rng.randrange(-1, 2) for _ in range(rng.randrange(1, 4))]
    sinks = torch.randn(kv_heads * group, generator=generator, device=device) if rng.random() < 0.3 else None
    return World(
        [draw(n, kv_heads * group, dim) for n in sizes],
        [draw(n, kv_heads, dim) for n in sizes],
        [draw(n, kv_heads, v_dim) for n in sizes],
        options,
        sinks,
    )


def differing(got: Rows, wanted: Rows) -> int:
    """Pieces whose out or lse differ in any bit, or hold NaN."""
    return sum(
        not (torch.equal(a, c) and torch.equal(b, d)) for (a, b), (c, d) in zip(got, wanted, strict=True)
    )


def compare_ways(world: World, base: Rows, rng: random.Random, tiles: list[schedule.Tile]) -> dict[str, int]:
    """Compute rows in several other ways; for each way the number of pieces that differ from ``base``."""
    sizes = [x.shape[0] for x in world.q]
    order = list(range(len(sizes)))
    rng.shuffle(order)
    tuned = replace(
        world,
        tuning=schedule.Tuning(
            tile=rng.choice([None, *tiles]),
            grid=rng.choice([None, True, False]),
            search=rng.choice([None, True, False]),
        ),
    )
    page = rng.choice([1, 16, 17, 64, 256])

    def rows(pieces: list[Piece]) -> Rows:
        return [(base[i][0][a:b], base[i][1][:, a:b]) for i, a, b in pieces]

    result = {"packed": differing(tuned.packed(order, slack=rng.choice([1, 5])), [base[i] for i in order])}
    i = rng.randrange(len(sizes))
    result["dense"] = differing(tuned.dense(i, masked=rng.random() < 0.5), [base[i]])
    cuts = sorted({0, sizes[i], *(rng.randrange(sizes[i] + 1) for _ in range(3))})
    chunks = [(i, a, b) for a, b in pairwise(cuts)]
    result["chunks"] = sum(
        differing(tuned.paged([c], page, rng, head_major=rng.random() < 0.5), rows([c])) for c in chunks
    )
    decode = [
        (n, size - 1, size) for n in order for size in [rng.randrange(1, sizes[n] + 1)] for _ in range(2)
    ]
    result["decode"] = differing(
        tuned.paged(decode, page, rng, slack=rng.choice([1, 3]), evict=rng.random() < 0.5), rows(decode)
    )
    mixed = decode + chunks[-1:]
    rng.shuffle(mixed)
    result["mixed"] = differing(tuned.paged(mixed, page, rng), rows(mixed))
    result["planned"] = differing(
        replace(tuned, tuning=schedule.Tuning()).paged(mixed, page, rng, planned=True), rows(mixed)
    )
    kv_heads = world.k[0].shape[1]
    first = rng.randrange(kv_heads)
    group = world.q[0].shape[1] // kv_heads
    mine = slice(first * group, (first + 1) * group)
    result["heads"] = differing(
        tuned.heads(first, 1).paged(decode, page, rng), [(o[:, mine], lse[mine]) for o, lse in rows(decode)]
    )
    return result

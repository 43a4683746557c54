"""Decode replay: the batch token by token through a paged cache, as a rollout engine computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from rl_attn_plugin.ops.cache import write_kv_cache
from rl_attn_plugin.replay.packing import Packed
from rl_attn_plugin.replay.pages import Pages, make_pages
from rl_attn_plugin.replay.paths import NotHere, Replay
from rl_attn_plugin.replay.results import AttentionPathResult
from rl_attn_plugin.types import AttentionOutput
from rl_attn_plugin.validation import Reasons, shape

DECODE = "decode_replay"
SHARED = "decode_replay:prefix_shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How the decode goes.

    Attributes:
        tokens_per_step: new tokens of a sequence in one call; more than one is speculative decode.
        prefix_length: tokens of each prompt whose pages a second sample of it shares, rounded down to whole pages;
            default half of the shortest sequence. 0 shares nothing.
        block_table: int32 ``[B, max_pages]`` to use instead of pages in random places.
    """

    tokens_per_step: int = 1
    prefix_length: int | None = None
    block_table: Tensor | None = None


def check_decode(options: DecodeOptions, packed: Packed, page_size: int) -> None:
    """Refuse what cannot be decoded.

    Raises:
        ValueError: with every reason.
    """
    why = Reasons("compare_decode_replay")
    why.need(
        options.tokens_per_step >= 1, "tokens_per_step must be at least 1, got {}", options.tokens_per_step
    )
    shortest = min(packed.keys)
    prefix = options.prefix_length
    why.need(
        prefix is None or 0 <= prefix <= shortest,
        "prefix_length must be 0 to the shortest sequence, {}, got {}",
        shortest,
        prefix,
    )
    why.need(
        packed.queries == packed.keys,
        "decode replay needs as many queries as keys, got {} and {}",
        list(packed.queries),
        list(packed.keys),
    )
    table = options.block_table
    if table is not None:
        pages = [-(-n // page_size) for n in packed.keys]
        if why.need(
            table.dtype == torch.int32 and table.dim() == 2 and table.shape[0] == len(pages)
            and table.shape[1] >= max(pages) and table.device == packed.device,
            "block_table must be int32 [{}, at least {}] on {}, got {} {} on {}",
            len(pages), max(pages), packed.device, table.dtype, shape(table), table.device,
        ):  # fmt: skip
            owned = [p for row, n in zip(table.tolist(), pages, strict=True) for p in row[:n]]
            why.need(
                len(set(owned)) == len(owned) and min(owned, default=0) >= 0,
                "block_table must give every sequence pages of its own, got {}",
                owned,
            )
    why.done()


def decode_replay(r: Replay, options: DecodeOptions) -> list[AttentionPathResult]:
    """Write each step's keys and values, then attend, for every sequence and for a second sample of it.

    The second sample shares the pages of its prefix, writes none of them (slot -1) and goes on in pages of its own:
    what prefix caching and group sampling do. Its rows must be those of the first.

    Returns:
        ``decode_replay``, and ``decode_replay:prefix_shared`` where a whole page is shared.

    Raises:
        NotHere: the attention is not causal.
    """
    p, size = r.packed, r.page_size
    if not r.inputs.causal:
        raise NotHere("decode needs causal attention: a token cannot see what comes after it")
    batch = len(p.keys)
    prefix = min(p.keys) // 2 if options.prefix_length is None else options.prefix_length
    shared = prefix // size
    doubled = replace(
        p, k=torch.cat((p.k, p.k)), v=torch.cat((p.v, p.v)), keys=p.keys * 2
    ) if shared else p  # fmt: skip
    table = options.block_table
    if table is not None and shared:  # the second sample's pages follow the last of the first's
        own = torch.arange(table.numel(), device=p.device, dtype=torch.int32).view_as(table)
        table = torch.cat((table, own + int(table.max()) + 1))
    pages = make_pages(doubled, size, seed=r.seed + 1, table=table)
    if shared:
        pages.table[batch:, :shared] = pages.table[:batch, :shared]

    steps = _steps(p, len(doubled.keys) // batch, options.tokens_per_step)
    slots = _slots(pages, steps, shared * size)
    # everything that can be is done once, outside the loop: its steps are many and short
    q, k, v = p.q[steps.token], p.k[steps.token], p.v[steps.token]
    flat_out = torch.empty(*q.shape[:2], v.shape[-1], dtype=r.inputs.out_dtype, device=p.device)
    flat_lse = torch.empty(q.shape[1], q.shape[0], device=p.device)
    longest = max(p.keys)
    for n, (begin, end) in enumerate(pairwise(steps.bounds)):
        write_kv_cache(k[begin:end], v[begin:end], pages.k, pages.v, slots[begin:end], impl=r.backend.impl)
        found = r.backend.paged(
            q[begin:end], pages.k, pages.v, steps.cu_q[n], steps.used[n], pages.table, options.tokens_per_step, longest,
            out=flat_out[begin:end],
        )  # fmt: skip
        flat_lse[:, begin:end] = found.lse
    out = torch.empty(
        len(doubled.keys) // batch, *p.q.shape[:2], v.shape[-1], dtype=flat_out.dtype, device=p.device
    )
    lse = torch.empty(out.shape[:3], device=p.device)
    out[steps.copy, steps.token], lse[steps.copy, steps.token] = flat_out, flat_lse.t()

    def result(name: str, n: int, **more: object) -> AttentionPathResult:
        bounds = None if options.tokens_per_step == 1 else options.tokens_per_step
        how = {} if bounds is None else {"chunk_bounds": [[0, bounds]]}
        return r.result(name, AttentionOutput(out[n], lse[n].t()), "paged", kv_page_size=size, **how, **more)

    results = [result(DECODE, 0)]
    if shared:
        results.append(result(SHARED, 1, prefix_length=shared * size))
    return results


@dataclass(frozen=True, slots=True)
class _Steps:
    """Which tokens each step feeds, made at once on the host so that no step waits for the device.

    Attributes:
        bounds: of each step in the flat arrays.
        token: ``[N]`` packed row.
        copy: ``[N]``, 0 for the first sample of a sequence, 1 for the second.
        sample: ``[N]`` row of the block table.
        position: ``[N]`` in its sequence.
        cu_q: int32 ``[steps, samples + 1]``.
        used: int32 ``[steps, samples]``.
    """

    bounds: list[int]
    token: Tensor
    copy: Tensor
    sample: Tensor
    position: Tensor
    cu_q: Tensor
    used: Tensor


def _steps(p: Packed, copies: int, width: int) -> _Steps:
    lengths = torch.tensor(p.keys * copies)
    firsts = torch.tensor([q.start for q, _ in p.sequences] * copies)
    begins = torch.arange(0, max(p.keys), width)
    # [steps, samples, width], in the order in which a call packs its tokens
    position = (begins[:, None, None] + torch.arange(width)).expand(-1, len(lengths), -1)
    real = position < lengths[:, None]
    sample = torch.arange(len(lengths))[:, None].expand_as(position)
    used = torch.minimum(begins[:, None] + width, lengths)
    counts = real.sum(2)
    bounds = torch.nn.functional.pad(counts.sum(1).cumsum(0), (1, 0))
    sample, position = sample[real], position[real]
    token, copy = firsts[sample] + position, sample // len(p.keys)
    cu_q = torch.nn.functional.pad(counts.cumsum(1), (1, 0)).int()
    tensors = (x.to(p.device) for x in (token, copy, sample, position, cu_q, used.int()))
    return _Steps(bounds.tolist(), *tensors)


def _slots(pages: Pages, steps: _Steps, shared: int) -> Tensor:
    """Where each token's keys and values go; -1 for a second sample's tokens in shared pages."""
    page = pages.table[steps.sample, steps.position // pages.size].long()
    slots = page * pages.size + steps.position % pages.size
    return slots.masked_fill((steps.copy > 0) & (steps.position < shared), -1)

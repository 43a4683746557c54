"""The ways in which training and rollout compute the same attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from rl_attn_plugin.ops.cache import merge_attention
from rl_attn_plugin.replay.backends import Backend, Kernels, Shard
from rl_attn_plugin.replay.inputs import AttentionComparisonInputs
from rl_attn_plugin.replay.packing import Packed, ints, offsets
from rl_attn_plugin.replay.pages import fill, make_pages
from rl_attn_plugin.replay.results import AttentionPathResult, PathProvenance
from rl_attn_plugin.replay.te_oracle import MergeMode, TEOracle
from rl_attn_plugin.types import AttentionOutput

FULL = "full_prefill"
CHUNKED = "chunked_prefill"
PAGED = "paged_kv"
PAGED_MERGE = "paged_kv_merge"
TE_MERGE = "transformer_engine_paged_kv"
FP8 = "fp8_kv_cache"

# Partials are held all at once, as a merge takes them; more than this is refused.
_PARTIALS_BYTES = 48 << 30


class NotHere(Exception):
    """A path cannot run on these inputs or on this machine; the text says exactly why."""


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What every path of one comparison shares.

    Attributes:
        inputs: as given.
        packed: the batch, rotated where there is a rotation.
        backend: what computes.
        requested: the backend's name as asked for.
        base: provenance that all paths have in common.
        chunk: queries of a chunk.
        page_size: tokens of a page.
        seed: of page placement.
    """

    inputs: AttentionComparisonInputs
    packed: Packed
    backend: Backend
    requested: str
    base: PathProvenance
    chunk: int
    page_size: int
    seed: int

    def result(
        self, name: str, found: AttentionOutput, materialization: str, **provenance: object
    ) -> AttentionPathResult:
        """A path's result with its provenance."""
        how = replace(self.base, attention_mode=name, materialization=materialization, **provenance)  # type: ignore[arg-type]
        return AttentionPathResult(name, found.out, found.lse, how)


def base_provenance(backend: Backend, requested: str) -> PathProvenance:
    """What all paths of a backend have in common."""
    return PathProvenance(
        attention_mode="", materialization="", requested_backend=requested, actual_backend=backend.name,
        actual_backend_source=backend.source, schedule_id=backend.schedule_id,
    )  # fmt: skip


def full_prefill(r: Replay) -> AttentionPathResult:
    """Every sequence at once, packed: the trainer's way."""
    p = r.packed
    found = r.backend.varlen(p.q, p.k, p.v, p.cu_q, p.cu_k, max(p.queries), max(p.keys))
    return r.result(FULL, found, "packed")


def chunked_prefill(r: Replay) -> AttentionPathResult:
    """Queries in chunks, each over all keys up to its last token; over all keys where attention is not causal."""
    p, causal = r.packed, r.inputs.causal
    if not causal and r.inputs.window != (-1, -1):
        raise NotHere("chunks of queries with a window that is not causal have no place on the diagonal")
    bounds = chunk_bounds(max(p.queries), r.chunk)
    out = torch.empty(*p.q.shape[:2], p.v.shape[-1], dtype=r.inputs.out_dtype, device=p.device)
    lse = torch.empty(p.q.shape[1], p.q.shape[0], device=p.device)
    firsts = [q.start for q, _ in p.sequences]
    for begin, end in bounds:
        spans = [
            (first + min(begin, n), first + min(end, n)) for first, n in zip(firsts, p.queries, strict=True)
        ]
        rows = torch.cat([torch.arange(a, b, device=p.device) for a, b in spans])
        used = [min(k - n + end, k) if causal else k for n, k in zip(p.queries, p.keys, strict=True)]
        found = r.backend.varlen(
            p.q[rows], p.k, p.v, offsets([b - a for a, b in spans], p.device), p.cu_k, end - begin, max(p.keys),
            used_k=ints(used, p.device),
        )  # fmt: skip
        out[rows], lse[:, rows] = found.out, found.lse
    return r.result(CHUNKED, AttentionOutput(out, lse), "packed", chunk_bounds=bounds)


def paged_kv(r: Replay, *, float8: bool = False) -> AttentionPathResult:
    """All queries over pages in random places, by the attention's own paging; ``float8``: the pages hold e4m3."""
    p = r.packed
    if float8 and not isinstance(r.backend, Kernels):
        raise NotHere(
            "the fp32 reference has no fp8 cache of its own: it reads what the kernels' writer stored"
        )
    pages = make_pages(p, r.page_size, seed=r.seed, float8=float8)
    fill(pages, p, r.backend.impl)
    found = r.backend.paged(
        p.q, pages.k, pages.v, p.cu_q, ints(p.keys, p.device), pages.table, max(p.queries), max(p.keys),
        k_scale=pages.k_scale, v_scale=pages.v_scale,
    )  # fmt: skip
    kv_dtype = {"kv_dtype": "float8_e4m3fn, scaled by head"} if float8 else {}
    return r.result(FP8 if float8 else PAGED, found, "paged", kv_page_size=r.page_size, **kv_dtype)


@dataclass(frozen=True, slots=True)
class Partials:
    """One partial a page, in ascending order of keys.

    Attributes:
        outs: fp32 ``[P, T, Hq, Dv]``.
        lses: fp32 ``[P, Hq, T]``.
        bounds: of each page, as pairs of absolute keys; a sink is the pair (-1, -1) before them.
    """

    outs: Tensor
    lses: Tensor
    bounds: list[list[int]]


def partials(r: Replay) -> Partials:
    """Attention over each page alone. Rows that see nothing of a page have ``(0, -inf)`` there."""
    p, inputs = r.packed, r.inputs
    bounds = chunk_bounds(max(p.keys), r.page_size)
    need = len(bounds) * p.q.shape[0] * p.q.shape[1] * (p.v.shape[-1] + 1) * 4
    if need > _PARTIALS_BYTES:
        raise NotHere(
            f"{len(bounds)} partials would take {need / 2**30:.0f} GiB, more than {_PARTIALS_BYTES >> 30}: "
            f"give a larger kv_page_size than {r.page_size}"
        )
    outs = torch.zeros(len(bounds), *p.q.shape[:2], p.v.shape[-1], device=p.device)
    lses = torch.full((len(bounds), p.q.shape[1], p.q.shape[0]), -torch.inf, device=p.device)
    for n, (begin, end) in enumerate(bounds):
        counts = [max(min(end, keys) - begin, 0) for keys in p.keys]
        rows = torch.cat(
            [
                torch.arange(k.start + begin, k.start + begin + count, device=p.device)
                for (_, k), count in zip(p.sequences, counts, strict=True)
            ]
        )
        shard = Shard(ints([begin] * len(counts), p.device), _shard_options(inputs, p, end))
        outs[n], lses[n] = r.backend.varlen(
            p.q,
            p.k[rows],
            p.v[rows],
            p.cu_q,
            offsets(counts, p.device),
            max(p.queries),
            end - begin,
            shard=shard,
        )[:2]
    if inputs.sinks is not None:  # enters once: a state without a value
        outs = torch.cat((outs.new_zeros(1, *outs.shape[1:]), outs))
        lses = torch.cat((inputs.sinks.float()[None, :, None].expand(1, *lses.shape[1:]), lses))
        bounds = [[-1, -1], *bounds]
    return Partials(outs, lses, bounds)


def _shard_options(inputs: AttentionComparisonInputs, p: Packed, end: int) -> dict[str, object]:
    """The mask as a shard that ends at key ``end`` sees it.

    With as many queries as keys, query i sits at position i, which top-left alignment says of any shard. Otherwise
    bottom-right alignment puts it ``Sk - end`` too far left, which the window makes good to the right only.
    """
    if p.queries == p.keys:
        return {"causal_alignment": "top_left", "sinks": None}
    if inputs.window[0] >= 0:
        raise NotHere("a window to the left over partials needs as many queries as keys")
    right = 0 if inputs.causal else inputs.window[1]
    ahead = max(p.keys) - end  # all sequences are equally long here
    return {"causal": False, "window": (-1, right + ahead if right >= 0 else -1), "sinks": None}


def paged_kv_merge(r: Replay, parts: Partials) -> AttentionPathResult:
    """The partials merged by `merge_attention`, in ascending order of keys."""
    out, lse, _ = merge_attention(parts.outs, parts.lses, impl=r.backend.impl)
    how = {"merge_backend": "rl_attn_plugin", "merge_mode": MergeMode.ASCENDING.value}
    return _merged(r, PAGED_MERGE, parts, out, lse, how)


def transformer_engine_paged_kv(
    r: Replay, parts: Partials, oracle: TEOracle, mode: MergeMode
) -> AttentionPathResult:
    """The same partials merged by TransformerEngine's helpers; its own schedule bears the path's plain name."""
    out, lse, _ = oracle.merge(parts.outs[:, None], parts.lses[:, None], mode)
    name = TE_MERGE if mode is oracle.native_mode else f"{TE_MERGE}:{mode.value}"
    about = oracle.provenance_of(mode)
    how = {"merge_backend": about.actual_backend, "merge_mode": mode.value, "te": about.to_dict()}
    return _merged(r, name, parts, out[0], lse[0], how)


def fp64_merge(parts: Partials) -> tuple[Tensor, Tensor]:
    """The partials merged as a weighted mean in fp64, written plainly: what both merges are held against.

    Returns:
        fp64 ``out [T, Hq, Dv]`` and ``lse [Hq, T]``.
    """
    lses = parts.lses.double()
    lse = lses.logsumexp(0)
    some = lse > -torch.inf
    out = torch.zeros(parts.outs.shape[1:], dtype=torch.float64, device=lse.device)
    for part, part_lse in zip(parts.outs, lses, strict=True):
        weight = torch.where(some, torch.exp(part_lse - torch.where(some, lse, 0.0)), 0.0)
        out += weight.t()[..., None] * part
    return out, lse


def _merged(
    r: Replay, name: str, parts: Partials, out: Tensor, lse: Tensor, how: Mapping[str, object]
) -> AttentionPathResult:
    found = r.result(
        name, AttentionOutput(out.to(r.inputs.out_dtype), lse), "partials", kv_page_size=r.page_size,
        kv_page_bounds=parts.bounds, merge_order="global_block_index", downcast_at="after_merge", **how,
    )  # fmt: skip
    return replace(found, merged=out)


def chunk_bounds(length: int, size: int) -> list[list[int]]:
    """``[[0, size], [size, 2 size], ..]`` up to ``length``."""
    return [list(pair) for pair in pairwise([*range(0, length, size), length])]

"""The states of all ranks as one, on every rank."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from rl_attn_plugin.monitor.state import State, best_of, rescaled


def all_reduce(state: State, group: dist.ProcessGroup | None = None) -> State:
    """Adds counts and sums, takes maxima, ranks the worst tokens of all. Integers add exactly; a float sum is rounded once
    a rank.

    Args:
        state: on a device that the group's backend can reach; of the same settings on every rank.
        group: as for `torch.distributed`; None is all ranks.
    """
    maxima = [state.maxima, *state.table_maxima.values()]
    highest = _reduced(maxima, dist.ReduceOp.MAX, group)
    added = [state.sums, rescaled(state, highest[0]), *state.table_sums.values()]
    sums = _reduced(added, dist.ReduceOp.SUM, group)
    counts = _reduced(
        [state.counts, state.evidence, state.histogram, *state.table_counts.values()],
        dist.ReduceOp.SUM,
        group,
    )
    keys, logps, places = best_of(
        _gathered(state.ranked_keys, group),
        _gathered(state.ranked_logps, group),
        _gathered(state.ranked_places, group),
        state.ranked_keys.shape[1],
    )
    names = list(state.table_maxima)
    return replace(
        state,
        counts=counts[0],
        evidence=counts[1],
        sums=sums[0],
        scaled=sums[1],
        maxima=highest[0],
        histogram=counts[2],
        table_counts=dict(zip(names, counts[3:], strict=True)),
        table_sums=dict(zip(names, sums[2:], strict=True)),
        table_maxima=dict(zip(names, highest[1:], strict=True)),
        ranked_keys=keys,
        ranked_logps=logps,
        ranked_places=places,
    )


def _reduced(
    parts: list[Tensor], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """One collective for all parts."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat, op, group)
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _gathered(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group)
    return torch.cat(parts, dim=1)

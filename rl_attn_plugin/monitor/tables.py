"""dlogp by position, by rollout probability and by group: fixed bins, so tables of two monitors add up."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from rl_attn_plugin.drift.curves import PROBABILITY_EDGES
from rl_attn_plugin.monitor.quantiles import COARSE_BINS
from rl_attn_plugin.monitor.settings import Settings
from rl_attn_plugin.monitor.tokens import Tokens

OTHER = "other"
"""Where a group's labels end: tokens whose integer has no label."""

_TOP = 2**20
_STARTS = [0, 1, 2, 3, *(s for o in range(2, 21) for s in (2**o, 3 * 2 ** (o - 1)) if s <= _TOP)]
# log of the edges in between: a device's exp could round a probability across an edge
_LOG_EDGES = [math.log(p) for p in PROBABILITY_EDGES[1:-1]]


class Table(NamedTuple):
    """One table's share of a state.

    Attributes:
        counts: int64 ``[N, COARSE_BINS]``.
        sums: fp64 ``[N, 2]``: dlogp and its abs.
        maxima: fp64 ``[N]``: the largest abs(dlogp).
    """

    counts: Tensor
    sums: Tensor
    maxima: Tensor


def table_bins(settings: Settings) -> dict[str, list[tuple[str, float | None, float | None]]]:
    """Label, first and last value of each bin, by table. Positions are counted from 0, last inclusive; probabilities
    lie in [low, high), the last bin including 1; groups have a label only."""
    position = [
        (f"{low}" if high == low + 1 else f"{low}-{high - 1}", float(low), float(high - 1))
        for low, high in itertools.pairwise(_STARTS)
    ]
    tables: dict[str, list[tuple[str, float | None, float | None]]] = {
        "position": [*position, (f"{_TOP}-", float(_TOP), None)],
        "probability": [
            (f"{low:g}-{high:g}", low, high) for low, high in itertools.pairwise(PROBABILITY_EDGES)
        ],
    }
    for name, labels in settings.groups.items():
        tables[name] = [(label, None, None) for label in (*labels, OTHER)]
    return tables


def table_sizes(settings: Settings) -> dict[str, int]:
    """Bins of each table."""
    return {name: len(bins) for name, bins in table_bins(settings).items()}


def tabulate(
    tokens: Tokens, size: Tensor, gate: Tensor, coarse: Tensor, settings: Settings
) -> dict[str, Table]:
    """Tables of one update.

    Args:
        tokens: of the update.
        size: fp64 ``[T]``, abs(dlogp), 0 where not compared.
        gate: fp64 ``[T]``, 0 where compared, else ``-inf``.
        coarse: int64 ``[T]``, its coarse bin.
        settings: of the monitor.
    """
    device = size.device
    places = {"probability": _probability_bin(tokens.rollout)}
    if tokens.position is not None:
        places["position"] = _position_bin(tokens.position)
    for name, labels in tokens.groups.items():
        count = len(settings.groups[name])
        places[name] = labels.where((labels >= 0) & (labels < count), count)
    weight = tokens.compared.long()
    # tokens that are not compared have size 0 and would raise the maximum of a bin that holds nothing
    candidates = size + gate
    columns = (tokens.d, size)
    return {
        name: _table(places[name], bins, weight, columns, candidates, coarse)
        if name in places
        else _none(bins, device)
        for name, bins in table_sizes(settings).items()
    }


def _position_bin(position: Tensor) -> Tensor:
    """Two bins an octave, from the exponent and the first bit of the mantissa; 0 and 1 are bins of their own."""
    bits = position.double().view(torch.int64) >> 51
    return bits.sub_(1023 << 1).clamp_(1, len(_STARTS) - 1) * (position > 0)


def _probability_bin(logp: Tensor) -> Tensor:
    """How many edges lie at or below; faster than a search among so few."""
    place = torch.zeros(logp.shape, dtype=torch.int8, device=logp.device)
    for edge in _LOG_EDGES:
        place += logp >= edge
    return place.long()


def _table(
    place: Tensor, bins: int, weight: Tensor, columns: tuple[Tensor, ...], candidates: Tensor, coarse: Tensor
) -> Table:
    table = _none(bins, place.device)
    table.counts.view(-1).scatter_add_(0, place * COARSE_BINS + coarse, weight)
    for i, column in enumerate(columns):
        table.sums[:, i].scatter_add_(0, place, column)
    table.maxima.scatter_reduce_(0, place, candidates, "amax")
    return table


def _none(bins: int, device: torch.device) -> Table:
    return Table(
        torch.zeros((bins, COARSE_BINS), dtype=torch.int64, device=device),
        torch.zeros((bins, 2), dtype=torch.float64, device=device),
        torch.full((bins,), float("-inf"), dtype=torch.float64, device=device),
    )

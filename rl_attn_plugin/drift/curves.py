"""Pictures of the drift as numbers: a histogram of signed dlogp, and abs(dlogp) along the completion."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_attn_plugin.drift.stats import Floats


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of signed dlogp in bins of equal width around 0.

    Attributes:
        edges: bin edges in nats, one more than counts; symmetric, so a run's bias can be seen.
        counts: tokens in each bin; the outermost bins hold the extremes.
        zeros: tokens at exactly 0, counted apart (and in their bin).
    """

    edges: list[float]
    counts: list[int]
    zeros: int


@dataclass(frozen=True, slots=True)
class PositionBin:
    """abs(dlogp) of the completion tokens at positions [first, last].

    Attributes:
        first: first index in the completion, from 0.
        last: last index, inclusive.
        count: tokens.
        mean_abs: their mean abs(dlogp).
        max_abs: their largest.
    """

    first: int
    last: int
    count: int
    mean_abs: float
    max_abs: float


def histogram(d: Floats, reach: float, bins: int = 61) -> Histogram:
    """Histogram over ``[-reach, reach]``; an odd number of bins keeps one centred on 0.

    Args:
        d: finite differences.
        reach: largest abs(d) to show; a run at exactly 0 gets a reach of 1e-6.
        bins: odd number of bins.
    """
    reach = max(float(reach), 1e-6)
    edges = np.linspace(-reach, reach, bins + 1)
    counts, _ = np.histogram(np.clip(d, -reach, reach), edges)
    return Histogram(edges.tolist(), counts.tolist(), int((d == 0).sum()))


def by_position(d: Floats, offset: NDArray[np.int64], bins: int = 24) -> list[PositionBin]:
    """Bins of equal width over the completion's positions; empty ones are left out.

    Args:
        d: finite differences.
        offset: index of each token in its completion, from 0.
        bins: most bins.
    """
    if d.size == 0:
        return []
    width = max(1, -(-int(offset.max() + 1) // bins))
    found = []
    for first in range(0, int(offset.max()) + 1, width):
        size = np.abs(d[(offset >= first) & (offset < first + width)])
        if size.size:
            found.append(
                PositionBin(first, first + width - 1, size.size, float(size.mean()), float(size.max()))
            )
    return found

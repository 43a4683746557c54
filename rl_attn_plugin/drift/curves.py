"""Pictures of the drift as numbers: histogram of signed dlogp, abs(dlogp) by position and by probability."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_attn_plugin.drift.stats import Floats

# Finer towards both ends: rare tokens carry the largest differences, near-certain ones the most tokens.
PROBABILITY_EDGES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of signed dlogp in bins of equal width around 0.

    Attributes:
        edges: bin edges in nats, one more than counts; symmetric, so a run's bias can be seen.
        counts: tokens in each bin; the outermost bins also hold what lies beyond the edges.
        zeros: tokens at exactly 0, counted apart (and in their bin).
        beyond: tokens beyond the outermost edges (and in the outermost bins).
    """

    edges: list[float]
    counts: list[int]
    zeros: int
    beyond: int


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


@dataclass(frozen=True, slots=True)
class ProbabilityBin:
    """abs(dlogp) of the tokens whose rollout probability lies in [low, high), the last bin including 1.

    Attributes:
        low: lower edge.
        high: upper edge.
        count: tokens.
        mean_abs: their mean abs(dlogp).
        max_abs: their largest.
    """

    low: float
    high: float
    count: int
    mean_abs: float
    max_abs: float


def histogram_reach(*arms: Floats) -> float:
    """One reach for all arms: their largest abs(d), but at most six times the largest 95 % quantile, so
    that a lone outlier does not squeeze everything else into one bin."""
    sizes = [np.abs(d) for d in arms if d.size]
    if not sizes:
        return 0.0
    widest = max(float(size.max()) for size in sizes)
    typical = max(float(np.quantile(size, 0.95)) for size in sizes)
    return min(widest, 6 * typical) or widest


def histogram(d: Floats, reach: float, bins: int = 61) -> Histogram:
    """Histogram over ``[-reach, reach]``; an odd number of bins keeps one centred on 0.

    Args:
        d: finite differences.
        reach: largest abs(d) with a bin of its own; 0 becomes 1e-6.
        bins: odd number of bins.
    """
    reach = float(reach) or 1e-6
    edges = np.linspace(-reach, reach, bins + 1)
    counts, _ = np.histogram(np.clip(d, -reach, reach), edges)
    return Histogram(edges.tolist(), counts.tolist(), int((d == 0).sum()), int((np.abs(d) > reach).sum()))


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
    size, found = np.abs(d), []
    for first in range(0, int(offset.max()) + 1, width):
        here = size[(offset >= first) & (offset < first + width)]
        if here.size:
            found.append(
                PositionBin(first, first + width - 1, here.size, float(here.mean()), float(here.max()))
            )
    return found


def by_probability(d: Floats, logp_rollout: Floats) -> list[ProbabilityBin]:
    """Bins of `PROBABILITY_EDGES` over the rollout's probability; empty ones are left out."""
    size, p, found = np.abs(d), np.exp(logp_rollout), []
    for low, high in itertools.pairwise(PROBABILITY_EDGES):
        here = size[(p >= low) & ((p < high) if high < 1 else (p <= high))]
        if here.size:
            found.append(ProbabilityBin(low, high, here.size, float(here.mean()), float(here.max())))
    return found

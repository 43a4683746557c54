"""A mergeable histogram with bins of equal relative width, and quantiles from it.

A bin is the exponent and the first bits of the mantissa of a float64: no logarithm, so that every device puts a value
into the same bin, and adding counts is all that merging needs. An octave has 64 bins, so the middle of a bin is within
1/128 = 0.8 % of anything in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LOW, _HIGH = (
    -40,
    14,
)  # octaves: 2^-40 nats is below what float32 log-probs can differ by, save near 0; 2^14 > 9000
_BITS = 6
_COARSE_BITS = 3
_EXPONENT_BIAS = 1023
_MANTISSA_BITS = 52

BINS = 2 + ((_HIGH - _LOW) << _BITS)
"""Bin 0 holds exact zeros, bin 1 what lies below 2^-40, the others 64 bins an octave up to 2^14."""

COARSE_BINS = 1 + ((_HIGH - _LOW) << _COARSE_BITS)
"""The same with 8 bins an octave, within 6.3 %; bin 0 holds zeros and what lies below 2^-40."""


def bin_of(size: Tensor) -> Tensor:
    """Bin of each value.

    Args:
        size: fp64 ``[T]``, not negative.

    Returns:
        int64 ``[T]``.
    """
    base = (_EXPONENT_BIAS + _LOW) << _BITS
    index = (size.view(torch.int64) >> (_MANTISSA_BITS - _BITS)) - (base - 2)
    return index.clamp_(1, BINS - 1) * (size != 0)


def coarsen(index: Tensor) -> Tensor:
    """Bin of the coarse histogram for bins of the fine one."""
    return ((index - 2) >> (_BITS - _COARSE_BITS)) + 1


def middle(index: int) -> float:
    """Value that stands for a bin."""
    if index < 2:
        return 0.0 if index == 0 else 2.0 ** (_LOW - 1)
    return _middle(index - 2, _BITS)


def coarse_middle(index: int) -> float:
    """Value that stands for a coarse bin."""
    return 0.0 if index == 0 else _middle(index - 1, _COARSE_BITS)


def edges() -> list[float]:
    """Lower edges of bins 1 to the last, and the upper edge of the last: ``BINS`` numbers."""
    found = [0.0]
    for octave in range(_LOW, _HIGH):
        found += [math.ldexp(1 + step / 2**_BITS, octave) for step in range(2**_BITS)]
    return [*found, 2.0**_HIGH]


def _middle(index: int, bits: int) -> float:
    octave, step = divmod(index, 1 << bits)
    return math.ldexp(1 + (step + 0.5) / (1 << bits), _LOW + octave)


def quantile(counts: Sequence[int], values: Sequence[float], q: float) -> float | None:
    """Quantile of what was counted, by linear interpolation between order statistics, as in `drift.stats`.

    Args:
        counts: how many values each bin holds, bins in ascending order.
        values: what stands for each bin.
        q: between 0 and 1.

    Returns:
        The quantile, or None when nothing was counted.
    """
    total = sum(counts)
    if total == 0:
        return None
    at = q * (total - 1)
    rank = int(at)
    low, high = _at_rank(counts, rank), _at_rank(counts, min(rank + 1, total - 1))
    return values[low] + (at - rank) * (values[high] - values[low])


def _at_rank(counts: Sequence[int], rank: int) -> int:
    seen = 0
    for index, count in enumerate(counts):
        seen += count
        if seen > rank:
            return index
    raise AssertionError("rank beyond the total")

"""The log-spaced histogram: bins that tile the line, and quantiles within 1 %."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_attn_plugin.monitor.quantiles import (
    BINS,
    COARSE_BINS,
    bin_of,
    coarse_middle,
    coarsen,
    edges,
    middle,
    quantile,
)

MIDDLES = [middle(i) for i in range(BINS)]


def test_bins_tile_the_line() -> None:
    border = edges()
    assert len(border) == BINS and border == sorted(border)
    inner = torch.tensor(border[1:-1], dtype=torch.float64)
    below = torch.nextafter(inner, torch.zeros(()).double())
    assert torch.equal(bin_of(inner), torch.arange(2, BINS)), "a bin holds its lower edge"
    assert torch.equal(bin_of(below), torch.arange(1, BINS - 1)), "and not its upper one"
    ends = torch.tensor([0.0, 1e-300, 2.0**-41, 1e300], dtype=torch.float64)
    assert bin_of(ends).tolist() == [0, 1, 1, BINS - 1]
    for low, high, value in zip(border[1:], border[2:], MIDDLES[2:], strict=False):
        assert low < value < high and (high - low) / 2 <= 0.0079 * low


def test_coarse_bins_hold_whole_fine_ones() -> None:
    index = torch.arange(BINS)
    coarse = coarsen(index).tolist()
    assert coarse[:2] == [0, 0] and coarse == sorted(coarse) and coarse[-1] == COARSE_BINS - 1
    for fine, big in itertools.islice(zip(MIDDLES, coarse, strict=True), 2, None):
        assert abs(coarse_middle(big) - fine) <= 0.0625 * fine


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 9000), st.floats(1e-4, 1e-1)), min_size=1, max_size=300),
    st.sampled_from([0.0, 0.5, 0.95, 0.99, 0.999, 1.0]),
)
def test_quantiles_are_within_one_percent(values: list[float], q: float) -> None:
    counts = torch.bincount(bin_of(torch.tensor(values, dtype=torch.float64)), minlength=BINS).tolist()
    assert quantile(counts, MIDDLES, q) == pytest.approx(np.quantile(values, q), rel=0.01)


def test_quantile_of_nothing() -> None:
    assert quantile([0, 0], [0.0, 1.0], 0.5) is None


def test_counts_beyond_what_a_float_holds() -> None:
    """2^60 tokens below and two above: ranks are integers."""
    assert quantile([2**60, 2], [1.0, 5.0], 0.5) == 1.0

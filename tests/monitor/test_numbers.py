"""Every metric against its formula, and against the offline statistics of the parity job."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_attn_plugin.drift import drift_stats, policy_stats
from rl_attn_plugin.drift.curves import by_probability
from rl_attn_plugin.monitor import DriftMonitor
from tests.monitor.world import expected, padded, sequences

GROUPS = {"turn": 4, "env": ("math", "code")}
ABOUT = ("dlogp/abs_p50", "dlogp/abs_p95", "dlogp/abs_p99", "dlogp/abs_p999")


def monitor_of(batch, **kwargs) -> DriftMonitor:
    monitor = DriftMonitor(groups=GROUPS)
    args, more = padded(batch, **kwargs)
    monitor.update(*args, step=0, **more)
    return monitor


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([0.0, 1e-7, 0.01, 0.3, 3.0]))
def test_every_metric_by_its_formula(seed: int, count: int, noise: float) -> None:
    batch = sequences(seed, count, noise=noise)
    got, want = monitor_of(batch).compute(), expected(batch)
    for key, value in want.items():
        assert got[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
    extra = {key for key in got if not key.startswith(("invalid/", "updates/"))} - want.keys() - set(ABOUT)
    assert extra <= {"prob/pearson"}, extra
    assert all(value == 0 for key, value in got.items() if key.startswith("invalid/"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-8000, 0, width=32), st.floats(-8000, 0, width=32)), min_size=1, max_size=80)
)
def test_the_offline_statistics_agree(pairs: list[tuple[float, float]]) -> None:
    trainer, rollout = (np.array(side) for side in zip(*pairs, strict=True))
    fills = ((trainer == 0) & (rollout < -0.125)) | ((rollout == 0) & (trainer < -0.125))
    trainer, rollout = trainer[~fills], rollout[~fills]
    monitor = DriftMonitor()
    t, r = torch.tensor(trainer), torch.tensor(rollout)
    monitor.update(t, r, torch.ones(len(t)), step=0)
    got = monitor.compute()
    assert got["tokens/compared"] == len(trainer)
    if not len(trainer):
        return
    d, policy = drift_stats(trainer - rollout), policy_stats(trainer, rollout)
    assert got["tokens/bit_equal"] == d.bit_equal
    close = {
        "dlogp/mean": d.mean,
        "dlogp/abs_mean": d.mean_abs,
        "dlogp/rms": d.rms,
        "dlogp/abs_max": d.max_abs,
        "kl/k1": policy.kl_k1,
        "kl/k2": policy.kl_k2,
        "kl/k3": policy.kl_k3,
        "ratio/min": policy.ratio_min,
        "ratio/mean": policy.ratio_mean,
        "ratio/max": policy.ratio_max,
        "ess": policy.ess,
        "prob/abs_mean": policy.prob_mean_abs,
        "prob/abs_max": policy.prob_max_abs,
    }
    for key, value in close.items():
        # offline a number that overflows is None, here it is infinite
        assert got[key] == (math.inf if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)), key
    quantiles = (d.p50_abs, d.p95_abs, d.p99_abs, d.p999_abs)
    for key, value in zip(ABOUT, quantiles, strict=True):
        assert got[key] == pytest.approx(value, rel=0.01, abs=1e-12), key


def test_tables_add_up_and_say_where_drift_is() -> None:
    batch = sequences(3, 40, longest=300)
    monitor = monitor_of(batch)
    d = np.concatenate([s.trainer - s.rollout for s in batch])
    rollout = np.concatenate([s.rollout for s in batch])
    position = np.concatenate([np.arange(len(s.trainer)) for s in batch])
    turn = np.concatenate([s.turn for s in batch])
    for name in ("position", "probability", "turn", "env"):
        bins = monitor.table(name)
        assert sum(b.count for b in bins) == len(d)
        assert sum(b.count * b.mean for b in bins) == pytest.approx(d.sum())
    for b in monitor.table("position"):
        assert b.low is not None and b.high is not None
        rows = (position >= b.low) & (position <= b.high)
        size = np.abs(d[rows])
        assert b.count == rows.sum() and b.abs_max == size.max()
        assert b.abs_mean == pytest.approx(size.mean())
        for got, q in ((b.abs_p50, 0.5), (b.abs_p95, 0.95), (b.abs_p99, 0.99)):
            assert got == pytest.approx(np.quantile(size, q), rel=0.0625)
    for b, want in zip(monitor.table("probability"), by_probability(d, rollout), strict=True):
        assert (b.low, b.high, b.count, b.abs_max) == (want.low, want.high, want.count, want.max_abs)
        assert b.abs_mean == pytest.approx(want.mean_abs)
    for b in monitor.table("turn"):
        assert b.count == (turn == int(b.label)).sum()
    with pytest.raises(ValueError, match="must be one of position, probability, turn, env, got 'lag'"):
        monitor.table("lag")


def test_a_label_that_was_not_declared_is_counted_apart() -> None:
    monitor = DriftMonitor(groups={"env": ("math",)})
    logp = -torch.ones(3)
    monitor.update(logp, logp, torch.ones(3), step=0, groups={"env": torch.tensor([0, 5, -1])})
    assert {b.label: b.count for b in monitor.table("env")} == {"math": 1, "other": 2}


def test_the_histogram_holds_every_token_by_sign() -> None:
    trainer, rollout = torch.tensor([-1.0, -1.0, -1.5]), torch.tensor([-1.0, -1.25, -1.0])
    monitor = DriftMonitor()
    monitor.update(trainer, rollout, torch.ones(3), step=0)
    edges, above, below = monitor.histogram()
    assert len(edges) == len(above) == len(below)
    assert (above[0], sum(above), sum(below)) == (1, 2, 1)
    for value, counts in ((0.25, above), (0.5, below)):
        index = max(i for i, edge in enumerate(edges) if edge <= value) + 1
        assert counts[index] == 1


def test_overflow_is_infinite_and_not_a_nan() -> None:
    monitor = DriftMonitor()
    trainer, rollout = torch.tensor([-0.5, -1.0]), torch.tensor([-5000.0, -1.0])
    monitor.update(trainer[None], rollout[None], torch.ones(1, 2), step=0)
    got = monitor.compute()
    assert got["ratio/max"] == got["kl/k3"] == got["chi2"] == got["sequence/ratio_mean"] == math.inf
    assert got["ess"] == pytest.approx(0.5) and got["clip/truncated_mean"] == pytest.approx(1.5)
    assert not any(math.isnan(value) for value in got.values())


def test_pearson_of_equal_probabilities_is_not_there() -> None:
    monitor = DriftMonitor()
    logp = torch.full((50,), -0.7)
    monitor.update(logp, logp, torch.ones(50), step=0)
    assert "prob/pearson" not in monitor.compute()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_floating_dtype(dtype: torch.dtype) -> None:
    trainer, rollout = (
        -torch.rand(100, dtype=torch.float64).to(dtype),
        -torch.rand(100, dtype=torch.float64).to(dtype),
    )
    keep = (trainer < 0) & (rollout < 0)
    monitor = DriftMonitor()
    monitor.update(trainer, rollout, keep, step=0)
    d = (trainer.double() - rollout.double())[keep]
    assert monitor.compute()["dlogp/mean"] == pytest.approx(d.mean().item(), rel=1e-12)


def test_worst_tokens_are_the_worst_with_text_around() -> None:
    class Letters:
        def decode(self, ids: list[int], /) -> str:
            return "".join(chr(ord("a") + i) for i in ids)

    trainer, rollout = torch.full((2, 6), -1.0), torch.full((2, 6), -1.0)
    trainer[0, 2], trainer[1, 0] = -2.0, -1.5
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 1] = False
    monitor = DriftMonitor(groups={"env": ("math", "code")}, context=(2, 1))
    monitor.update(
        trainer,
        rollout,
        mask,
        step=7,
        token_ids=torch.arange(12).view(2, 6),
        sequence_ids=torch.tensor([40, 41]),
        groups={"env": torch.tensor([1, 0])},
    )
    first, second = monitor.worst(Letters())
    assert (first.sequence, first.position, first.token_id, first.step) == (40, 1, 2, 7)
    assert (first.dlogp, first.groups, first.text) == (-1.0, {"env": "code"}, "c")
    assert (first.text_before, first.text_after) == ("a", "d"), "not the masked-out b, nor the other row"
    assert (second.sequence, second.dlogp, second.text) == (41, -0.5, "g")
    assert (second.text_before, second.text_after) == ("", "h"), "a sequence's first token has none before it"
    assert monitor.worst()[0].text is None

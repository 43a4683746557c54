"""What is no log-prob is counted under its name, averaged into nothing and never taken for 0."""

from __future__ import annotations

import math

import pytest
import torch

from rl_attn_plugin.monitor import MISSING, DriftMonitor

NAN, INF = math.nan, math.inf
GOOD = ([-1.0, -2.0, -0.5], [-1.1, -2.0, -0.4])


def seen(trainer, rollout, mask=None, **choices) -> dict[str, float]:
    trainer, rollout = torch.tensor(trainer), torch.tensor(rollout)
    monitor = DriftMonitor(**choices)
    monitor.update(
        trainer, rollout, torch.ones(trainer.shape) if mask is None else torch.tensor(mask), step=0
    )
    return monitor.compute()


def invalid(got: dict[str, float]) -> dict[str, int]:
    return {
        key.removeprefix("invalid/"): int(value)
        for key, value in got.items()
        if key.startswith("invalid/") and value
    }


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (NAN, "nan"),
        (INF, "inf"),
        (-INF, "inf"),
        (MISSING, "missing"),
        (-9999.0, "sentinel"),
        (torch.finfo(torch.float32).min, "sentinel"),
        (0.25, "positive"),
        (1e-7, "positive"),
        (0.0, "zero_fill"),
    ],
)
@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_each_kind_is_counted_once_and_leaves_no_trace(value: float, kind: str, side: str) -> None:
    clean = seen(*GOOD)
    bad, other = [*GOOD[0], value], [*GOOD[1], -3.0]
    got = seen(bad, other) if side == "trainer" else seen(other, bad)
    clean = clean if side == "trainer" else seen(GOOD[1], GOOD[0])
    assert invalid(got) == {f"{side}_{kind}": 1}
    assert got["tokens/active"] == 4 and got["tokens/compared"] == 3 and got["coverage"] == 0.75
    for key, number in clean.items():
        if key.startswith(("dlogp/", "kl/", "ratio/", "prob/", "ppl/", "chi2", "ess", "clip/")):
            assert got[key] == number, key


def test_both_sides_are_counted() -> None:
    assert invalid(seen([NAN, -1.0], [-INF, -1.0])) == {"trainer_nan": 1, "rollout_inf": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sentinels_survive_casts(dtype: torch.dtype) -> None:
    """-9999 is -9984 in bf16 and -10000 in fp16; -100 and MISSING are exact."""
    monitor = DriftMonitor(sentinels=(-100.0, -1234.5))
    rollout = torch.tensor([-9999.0, MISSING, -100.0, -1234.5, -1.0]).to(dtype)
    monitor.update(torch.full((5,), -1.0), rollout, torch.ones(5), step=0)
    got = monitor.compute()
    assert invalid(got) == {"rollout_sentinel": 3, "rollout_missing": 1} and got["tokens/compared"] == 1


def test_an_honest_zero_is_compared() -> None:
    """A probability that rounds to 1 on one side, with rounding noise on the other."""
    got = seen([0.0, 0.0, -0.1, -1e-6], [0.0, -0.125, 0.0, 0.0])
    assert invalid(got) == {} and got["tokens/compared"] == 4 and got["tokens/bit_equal"] == 1


def test_a_fill_is_no_drift() -> None:
    """Tool tokens with a dummy 0 that the mask forgot."""
    got = seen([-1.0, -5.0, -7.0], [-1.0, 0.0, 0.0])
    assert invalid(got) == {"rollout_zero_fill": 2} and got["dlogp/abs_max"] == 0


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, -9999.0, 0.0, 3.0])
def test_masked_out_positions_may_hold_anything(garbage: float) -> None:
    trainer, rollout = [[-1.0, garbage], [-2.0, -1.0]], [[-1.5, garbage], [garbage, -1.25]]
    got = seen(trainer, rollout, [[1, 0], [0, 1]])
    assert invalid(got) == {} and got["dlogp/abs_mean"] == 0.375 and got["coverage"] == 1


def test_a_side_that_is_not_there_is_missing_and_not_equal() -> None:
    monitor = DriftMonitor()
    monitor.update(-torch.rand(2, 3) - 0.1, None, torch.ones(2, 3), step=0)
    monitor.update(None, -torch.rand(4) - 0.1, torch.tensor([1, 1, 0, 0]), step=0)
    monitor.update(None, None, torch.ones(1), step=0)
    got = monitor.compute()
    assert invalid(got) == {"rollout_missing": 7, "trainer_missing": 3}
    assert got["coverage"] == 0 and "dlogp/mean" not in got and "kl/k3" not in got


def test_shapes_that_disagree_are_counted_and_not_broadcast() -> None:
    monitor = DriftMonitor()
    good = -torch.ones(2, 3)
    monitor.update(good, -torch.ones(2, 4), torch.ones(2, 3), step=0)
    monitor.update(good, good, torch.ones(2, 1), step=0)
    monitor.update(good, -torch.ones(3), torch.ones(2, 3), step=0)
    monitor.update(good, good, torch.ones(2, 3), step=0)
    got = monitor.compute()
    assert got["updates/refused"] == 3 and got["updates/count"] == 4
    assert invalid(got) == {"shape": 14} and got["tokens/active"] == 20 and got["tokens/compared"] == 6


def test_a_mask_that_is_none_is_counted() -> None:
    got = seen([-1.0] * 5, [-1.5] * 5, [1.0, 0.0, 0.5, NAN, 2.0])
    assert invalid(got) == {"mask": 3} and got["tokens/compared"] == 1 and got["tokens/active"] == 4


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 3), (4,)])
def test_nothing_to_compare_is_not_zero(shape: tuple[int, ...]) -> None:
    monitor = DriftMonitor(groups={"turn": 2})
    monitor.update(-torch.ones(shape), -torch.ones(shape), torch.zeros(shape), step=0)
    got = monitor.compute()
    assert got["updates/empty"] == 1 and got["tokens/active"] == 0
    assert not [
        k for k in got if k.startswith(("dlogp", "kl", "ratio", "prob", "coverage", "sequence", "ess"))
    ]
    assert monitor.table("position") == [] and monitor.worst() == []


def test_a_sequence_with_a_hole_has_no_log_ratio() -> None:
    trainer = torch.tensor([[-1.0, -1.0], [-1.0, NAN], [-2.0, -1.0]])
    rollout = torch.tensor([[-1.5, -1.0], [-9.0, -1.0], [-2.0, -1.25]])
    monitor = DriftMonitor()
    monitor.update(trainer, rollout, torch.ones(3, 2), step=0)
    got = monitor.compute()
    assert (got["sequence/count"], got["sequence/incomplete"]) == (2, 1)
    assert got["sequence/log_ratio_mean"] == 0.375 and got["sequence/log_ratio_max"] == 0.5


def test_packed_tokens_without_names_have_no_sequences() -> None:
    got = seen(*GOOD)
    assert not [key for key in got if key.startswith(("sequence/", "turn/"))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"token_ids": torch.zeros(2, 4)},
            r"token_ids must have the shape of the mask, \[2, 3\], got \[2, 4\]",
        ),
        ({"positions": torch.zeros(3)}, "positions must have the shape of the mask"),
        ({"groups": {"lag": torch.zeros(2)}}, "groups must be declared when the monitor is made, got lag"),
    ],
)
def test_wrong_descriptions_are_refused(change, message: str) -> None:
    logp = -torch.ones(2, 3)
    with pytest.raises(ValueError, match=message):
        DriftMonitor().update(logp, logp, torch.ones(2, 3), step=0, **change)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"clip": (2.0, 0.5)}, "clip must be two ratios"),
        ({"over_threshold": -1.0}, "over_threshold must be at least 0"),
        ({"worst": 0}, "worst must be at least 1"),
        ({"groups": {"position": 3}}, "one that the monitor makes itself"),
        ({"groups": {"env": ()}}, "at least one label"),
    ],
)
def test_wrong_settings_are_refused(choices, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DriftMonitor(**choices)


def test_integers_and_odd_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must hold floating-point numbers, got torch\.int64"):
        DriftMonitor().update(torch.ones(3, dtype=torch.int64), -torch.ones(3), torch.ones(3), step=0)
    with pytest.raises(ValueError, match=r"must be padded \[B, S\] or packed \[T\], got \[1, 1, 1\]"):
        DriftMonitor().update(-torch.ones(1, 1, 1), -torch.ones(1, 1, 1), torch.ones(1, 1, 1), step=0)

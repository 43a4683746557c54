"""Planted faults are named, and clean data name none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rl_attn_plugin.monitor import FAULTS, Diagnosis, DriftMonitor
from rl_attn_plugin.monitor.diagnosis import at_least
from tests.monitor import faults
from tests.monitor.faults import World, world


def diagnosed(w: World) -> list[Diagnosis]:
    monitor = DriftMonitor(groups={"lag": 4})
    monitor.update(w.trainer, w.rollout, w.mask, step=0, **w.more)
    return monitor.diagnose()


def names(w: World) -> list[str]:
    return [finding.name for finding in diagnosed(w)]


def at(**choices) -> Callable[[int], World]:
    return lambda seed: world(seed, **choices)


PLANTED: list[tuple[str, str, Callable[[int], World]]] = [
    ("late", "shift", faults.late),
    ("early", "shift", faults.early),
    ("rollout T 0.7", "temperature", at(rollout_temperature=0.7)),
    ("rollout T 0.95", "temperature", at(rollout_temperature=0.95)),
    ("rollout T 1.2", "temperature", at(rollout_temperature=1.2)),
    ("trainer T 0.6", "temperature", at(trainer_temperature=0.6)),
    ("T 0.7, much noise", "temperature", at(rollout_temperature=0.7, noise=0.2)),
    ("top-p 0.95", "truncation", at(top_p=0.95)),
    ("top-p 0.9", "truncation", at(top_p=0.9)),
    ("top-p 0.5", "truncation", at(top_p=0.5)),
    ("top-k 20", "truncation", at(top_k=20)),
    ("all copied", "identical", faults.all_copied),
    ("sequences copied", "copied", faults.copied_sequences),
    ("ends copied", "copied", faults.copied_ends),
    ("bf16", "rounding", lambda seed: faults.stored(seed, torch.bfloat16)),
    ("fp16", "rounding", lambda seed: faults.stored(seed, torch.float16)),
    ("stale", "stale", faults.stale),
    ("padding, 0", "padding", lambda seed: faults.other_padding(seed, 0.0)),
    ("padding, NaN", "padding", lambda seed: faults.other_padding(seed, float("nan"))),
    ("padding, -1", "padding", lambda seed: faults.other_padding(seed, -1.0)),
    ("first token", "boundary", lambda seed: faults.neighbour(seed, "first")),
    ("last token", "boundary", lambda seed: faults.neighbour(seed, "last")),
    ("fills", "zero_fill", faults.filled),
]

CLEAN: list[tuple[str, Callable[[int], World]]] = [
    ("bf16 noise", at()),
    ("little noise", at(noise=0.001)),
    ("ten times the noise", at(noise=0.3)),
    ("certain policy", at(entropy=0.3)),
    ("flat policy", at(entropy=3.0)),
    ("same temperature", at(rollout_temperature=0.7, trainer_temperature=0.7)),
    ("fresh weights at all lags", faults.fresh),
    ("few tokens", at(rows=2, width=40)),
]


@pytest.mark.parametrize(("fault", "make"), [case[1:] for case in PLANTED], ids=[case[0] for case in PLANTED])
def test_a_planted_fault_is_named(fault: str, make: Callable[[int], World]) -> None:
    for seed in range(3):
        found = {finding.name: finding for finding in diagnosed(make(seed))}
        assert fault in found, (seed, found)
        assert found[fault].confidence > (0.15 if fault == "temperature" else 0.5)
        assert found[fault].evidence and found[fault].message
        assert fault in FAULTS


@pytest.mark.parametrize(("fault", "make"), [case[1:] for case in PLANTED], ids=[case[0] for case in PLANTED])
def test_no_other_fault_is_named_with_it(fault: str, make: Callable[[int], World]) -> None:
    """But for those that it brings: fills where padding or a nucleus of one token gives zeros."""
    brings = {"padding": {"zero_fill", "boundary"}, "truncation": {"zero_fill"}, "rounding": {"rounding"}}
    for seed in range(3):
        others = set(names(make(seed))) - {fault} - brings.get(fault, set())
        assert not others, (seed, others)


@pytest.mark.parametrize("make", [case[1] for case in CLEAN], ids=[case[0] for case in CLEAN])
def test_clean_data_name_nothing(make: Callable[[int], World]) -> None:
    for seed in range(6):
        assert names(make(100 + seed)) == [], seed


def test_which_way_round() -> None:
    """A finding says which side; the wrong one would send people to the wrong code."""
    trunc = {f.name: f for f in diagnosed(world(0, top_p=0.9))}["truncation"]
    assert "the rollout's log-probs are renormalised" in trunc.message
    assert trunc.evidence["mean_log_s"] == pytest.approx(-0.088, abs=0.01), "between log 0.9 and 0"
    w = world(0, top_p=0.9)
    swapped = {f.name: f for f in diagnosed(World(w.rollout, w.trainer, w.mask))}["truncation"]
    assert "the trainer's log-probs are renormalised" in swapped.message
    sharp = {f.name: f for f in diagnosed(world(0, rollout_temperature=0.7))}["temperature"]
    assert "the rollout's distribution is sharper" in sharp.message and sharp.evidence["slope"] < 1
    flat = {f.name: f for f in diagnosed(world(0, rollout_temperature=1.3))}["temperature"]
    assert "the trainer's distribution is sharper" in flat.message and flat.evidence["slope"] > 1
    assert "of the token after it" in diagnosed(faults.early(0))[0].message
    assert "of the token before it" in diagnosed(faults.late(0))[0].message
    side = {f.name: f for f in diagnosed(faults.other_padding(0, -1.0))}["padding"]
    assert "from the right border" in side.message
    low = {f.name: f for f in diagnosed(faults.stored(0, torch.bfloat16))}["rounding"]
    assert (
        "the rollout's in bf16" in low.message and "trainer's" not in low.message.split(":")[1].split(".")[0]
    )


def test_merging_keeps_what_was_seen() -> None:
    """No rank sees enough tokens to speak, all together do."""
    w = world(3, rollout_temperature=0.7, rows=4, width=40)
    parts = []
    for row in range(4):
        monitor = DriftMonitor()
        monitor.update(w.trainer[row : row + 1], w.rollout[row : row + 1], w.mask[row : row + 1], step=0)
        parts.append(monitor)
    assert [p.diagnose() for p in parts] == [[], [], [], []]
    many = parts[0]
    for _ in range(6):
        for p in parts:
            many = many.merge(p)
    assert "temperature" in [f.name for f in many.diagnose()]


def test_a_share_is_no_surer_than_its_sample() -> None:
    assert at_least(0, 0) == 0.0
    assert at_least(10, 10) < 0.4 < at_least(100, 100) < 0.9 < at_least(10_000, 10_000) < 1
    assert at_least(5_000, 10_000) == pytest.approx(0.48, abs=0.01)

"""What users of RL frameworks reported, each with what the monitor answers.

Issues by repository: the symptom is theirs, the data here are made.
"""

from __future__ import annotations

import math

import pytest
import torch

from rl_attn_plugin.monitor import DriftMonitor, Watch
from tests.monitor import faults
from tests.monitor.faults import World, world


def monitor_of(w: World, **groups) -> DriftMonitor:
    monitor = DriftMonitor(groups=groups)
    monitor.update(w.trainer, w.rollout, w.mask, step=0, **w.more)
    return monitor


def first_fault(w: World) -> str:
    return monitor_of(w).diagnose()[0].name


# A. Semantics of log-probs


@pytest.mark.parametrize(
    ("trainer", "rollout", "sharper"),
    [
        (
            1.0,
            0.7,
            "rollout",
        ),  # verl#3133, slime#557, AReaL#581, NeMo#316, prime-rl#697, miles#68: trainer forgets T
        (0.7, 1.0, "trainer"),  # trl#4159, tinker-feedback#148, vime#64: the engine's raw log-probs
        (1.3, 1.0, "rollout"),  # sglang#36213, slime#2319: input log-probs ignore T
    ],
)
def test_a_temperature_on_one_side(trainer: float, rollout: float, sharper: str) -> None:
    found = monitor_of(world(5, trainer_temperature=trainer, rollout_temperature=rollout)).diagnose()[0]
    assert found.name == "temperature" and f"the {sharper}'s distribution is sharper" in found.message


def test_raw_and_processed_log_probs_mixed() -> None:
    """verl#6240: some engines return raw, some processed log-probs; a group tells which."""
    raw, processed = (
        world(1, trainer_temperature=0.7),
        world(2, trainer_temperature=0.7, rollout_temperature=0.7),
    )
    both = [
        torch.cat(pair)
        for pair in zip(*((w.trainer, w.rollout, w.mask) for w in (raw, processed)), strict=True)
    ]
    engine = torch.arange(2).repeat_interleave(len(raw.mask))
    monitor = DriftMonitor(groups={"engine": ("a", "b")})
    monitor.update(*both, step=0, groups={"engine": engine})
    assert monitor.diagnose()[0].name == "temperature"
    a, b = monitor.table("engine")
    assert a.abs_mean > 10 * b.abs_mean


@pytest.mark.parametrize(
    ("choices", "low", "high"),
    [
        ({"top_p": 0.9}, math.log(0.9), -0.05),
        ({"top_k": 20}, -0.3, -0.15),
        ({"top_p": 0.7}, math.log(0.7), -0.2),
    ],
)
def test_truncated_sampling_biases_by_log_s(choices: dict, low: float, high: float) -> None:
    """trl#6789: -0.105 at top-p 0.9; SkyRL#877, prime-rl#3431, ms-swift#8442: defaults that truncate."""
    found = {f.name: f for f in monitor_of(world(5, **choices)).diagnose()}["truncation"]
    assert low <= found.evidence["mean_log_s"] <= high


def test_a_temperature_of_zero() -> None:
    """slime#2297, miles#1190: logits divided by 0 give NaN or infinities, and greedy log-probs of exactly 0."""
    logits = torch.randn(40, 50)
    greedy = logits.argmax(-1, keepdim=True)
    trainer = torch.log_softmax(logits, -1).gather(-1, greedy)[:, 0]
    divided = torch.log_softmax(logits / 0.0, -1).gather(-1, greedy)[:, 0]
    monitor = DriftMonitor()
    monitor.update(trainer, divided, torch.ones(40), step=0)
    monitor.update(trainer, torch.zeros(40), torch.ones(40), step=0)
    got = monitor.compute()
    assert got["invalid/rollout_nan"] == 40 and got["tokens/compared"] == got["coverage"] == 0
    assert got["invalid/rollout_zero_fill"] == 40 and "dlogp/mean" not in got
    assert Watch(min_tokens=1).judge(0, monitor).verdict == "INVALID"


def test_drift_that_grows_with_a_changed_default() -> None:
    """vime#64 and ServiceNow's upgrade: 0.011, then 0.036 after raw log-probs became processed ones."""
    before, after = monitor_of(world(0)), monitor_of(world(0, rollout_temperature=0.9))
    assert before.diagnose() == [] and after.diagnose()[0].name == "temperature"
    assert after.compute()["dlogp/abs_mean"] > 3 * before.compute()["dlogp/abs_mean"]


# B. Missing and invalid values


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_nan_in_padding(garbage: float) -> None:
    """verl#2377, SkyRL#1633: 0 times NaN is NaN."""
    w = world(0)
    dirty = World(w.trainer.masked_fill(~w.mask, garbage), w.rollout.masked_fill(~w.mask, garbage), w.mask)
    clean, got = monitor_of(w).compute(), monitor_of(dirty).compute()
    assert clean == got


def test_missing_log_probs_that_became_zero() -> None:
    """vime#70, verifiers#2078: a fill is no certainty, and no drift either."""
    filled = monitor_of(faults.filled(0))
    got, clean = filled.compute(), monitor_of(world(0)).compute()
    assert filled.diagnose()[0].name == "zero_fill" and 0.85 < got["coverage"] < 0.95
    assert got["dlogp/abs_mean"] == pytest.approx(clean["dlogp/abs_mean"], rel=0.1)
    assert Watch().judge(0, filled).verdict == "INVALID"


def test_tool_tokens_with_a_dummy_zero() -> None:
    """SkyRL#354: the mask covers observations, which hold 0 on the rollout's side."""
    w = world(0)
    tool = torch.zeros_like(w.mask)
    tool[:, 10:20] = True
    rollout = w.rollout.masked_fill(tool, 0.0)
    wrong, right = World(w.trainer, rollout, w.mask), World(w.trainer, rollout, w.mask & ~tool)
    got, want = monitor_of(wrong).compute(), monitor_of(right).compute()
    assert got["invalid/rollout_zero_fill"] > 200 and want["coverage"] == 1
    assert got["dlogp/abs_mean"] == pytest.approx(want["dlogp/abs_mean"], rel=0.1)


def test_where_a_nan_comes_from() -> None:
    """vllm#55766, NeMo#1885: NaN after a prefix-cache hit; the request is what is needed to find it."""
    w = world(0)
    rollout = w.rollout.clone()
    rollout[7, 3:5] = math.nan
    monitor = DriftMonitor(groups={"cache": ("miss", "hit")})
    hit = torch.zeros(len(w.mask), dtype=torch.int64)
    hit[7] = 1
    monitor.update(
        w.trainer,
        rollout,
        w.mask,
        step=9,
        sequence_ids=torch.arange(len(w.mask)) + 300,
        groups={"cache": hit},
    )
    found = monitor.invalid()
    assert [(t.step, t.sequence, t.position, t.groups["cache"]) for t in found] == [
        (9, 307, 3, "hit"),
        (9, 307, 4, "hit"),
    ]
    assert all(math.isnan(t.logp_rollout) and t.logp_trainer == w.trainer[7, t.position] for t in found)
    assert math.isfinite(monitor.compute()["dlogp/mean"])


def test_a_gap_that_nobody_reports() -> None:
    """SkyRL#1870: the rollout's log-probs were never handed over."""
    w = world(0)
    monitor = DriftMonitor()
    monitor.update(w.trainer, None, w.mask, step=0)
    judged = Watch().judge(0, monitor)
    assert judged.verdict == "INVALID" and judged.metrics["coverage"] == 0
    assert "rollout missing" in judged.reasons[0]


def test_trainers_own_log_probs_as_a_fallback() -> None:
    """ROLL and Megatron fall back to the trainer's: whole sequences, and the ends of short ones."""
    for made in (faults.copied_sequences(1), faults.copied_ends(1)):
        assert first_fault(made) == "copied"
    assert first_fault(faults.all_copied(1)) == "identical"


# C. Alignment


@pytest.mark.parametrize("made", [faults.late, faults.early])
def test_one_position_off(made) -> None:
    """prime-rl#1525, ms-swift#8196."""
    assert first_fault(made(2)) == "shift"


def test_a_mask_that_is_one_position_off() -> None:
    """ms-swift#8427: the mask ends one too late, on a position where the rollout has a fill; ratios far from 1."""
    w = world(0)
    one_late = w.mask.roll(1, dims=1)
    one_late[:, 0] = False
    rollout = w.rollout.masked_fill(~w.mask, 0.0)
    trainer = w.trainer.masked_fill(~w.mask, -4.0)
    got = monitor_of(World(trainer, rollout, one_late)).compute()
    assert got["invalid/rollout_zero_fill"] == (one_late & ~w.mask).sum()
    assert got["sequence/incomplete"] > 40 and got["ratio/max"] < 2


def test_a_log_prob_that_forgets_positions() -> None:
    """slime#1809: position ids missing; drift grows along the answer, and a mean says only that it is there."""
    w = world(0)
    growing = torch.linspace(0, 1, w.mask.shape[1]) * torch.randn(
        w.mask.shape, generator=torch.Generator().manual_seed(0)
    )
    monitor = monitor_of(World((w.trainer + growing).clamp(max=-1e-4), w.rollout, w.mask))
    bins = [b for b in monitor.table("position") if b.count > 100]
    assert bins[-1].abs_mean > 4 * bins[0].abs_mean


@pytest.mark.parametrize("end", ["first", "last"])
def test_a_packing_boundary(end: str) -> None:
    """prime-rl#606: the first token of a sequence is scored after its neighbour; slime#1045: the last one."""
    found = monitor_of(faults.neighbour(4, end)).diagnose()[0]
    assert found.name == "boundary" and f"{end} tokens" in found.message


@pytest.mark.parametrize("fill", [0.0, math.nan, -1.0])
def test_padded_on_different_sides(fill: float) -> None:
    """unsloth#6738, verl#1381."""
    assert "padding" in [f.name for f in monitor_of(faults.other_padding(3, fill)).diagnose()]


def test_one_layout_drifts_and_the_other_does_not() -> None:
    """unsloth-zoo#840: left-padded batches are off by up to 3.6 nats, packed ones exact."""
    exact, off = world(1, noise=0.0), world(2, noise=0.4)
    monitor = DriftMonitor(groups={"layout": ("packed", "left-padded")})
    for index, w in enumerate((exact, off)):
        monitor.update(
            w.trainer, w.rollout, w.mask, step=0, groups={"layout": torch.full((len(w.mask),), index)}
        )
    packed, padded = monitor.table("layout")
    assert packed.abs_max < 1e-6 < 1 < padded.abs_max
    assert monitor.worst()[0].groups == {"layout": "left-padded"}


def test_drift_that_grows_with_length() -> None:
    """ISEEKYAN/Megatron-LM#76, trl#5814: sums over sequences grow with length although tokens do not drift more."""
    short, long = (
        monitor_of(World(w.trainer - 0.01, w.rollout, w.mask))
        for w in (world(1, width=16), world(1, width=256))
    )
    a, b = short.compute(), long.compute()
    assert b["sequence/log_ratio_abs_mean"] > 8 * a["sequence/log_ratio_abs_mean"]
    assert b["sequence/mean_dlogp_abs_mean"] < 1.5 * a["sequence/mean_dlogp_abs_mean"]


# D. Signs and spaces: slime#596 forgot the abs


def test_signed_and_absolute_are_apart() -> None:
    logp = torch.tensor([-1.0, -2.0])
    monitor = DriftMonitor()
    monitor.update(logp, logp.flip(0), torch.ones(2), step=0)
    got = monitor.compute()
    assert got["dlogp/mean"] == got["kl/k1"] == 0 and got["dlogp/abs_mean"] == 1


def test_stored_in_few_bits() -> None:
    """slime#245, slime#892: bf16 log-probs from the rollout."""
    assert first_fault(faults.stored(1, torch.bfloat16)) == "rounding"


def test_stale_weights_are_told_from_numerics() -> None:
    """NeMo, AReaL and asynchronous trainers: drift of lag 0 is the numerics', the growth that of the weights."""
    monitor = monitor_of(faults.stale(1), lag=4)
    assert [f.name for f in monitor.diagnose()] == ["stale"]
    by_lag = [b.abs_mean for b in monitor.table("lag")]
    assert by_lag == sorted(by_lag) and by_lag[3] > 3 * by_lag[0]

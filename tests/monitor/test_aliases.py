"""Each alias against an implementation that shares no code with it, and what is wrong with the numbers."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_attn_plugin.monitor import DriftMonitor
from rl_attn_plugin.monitor.aliases import FRAMEWORKS, aliases
from tests.monitor.frameworks import INDEPENDENT, Rows, exp

OPTIONS = {
    "verl": [
        {},
        {"micro_batch_rows": 2},
        {"rollout_is": "token", "batch_normalize": True},
        {"rollout_rs": {"token_k1": (0.7, 1.2), "seq_mean_k1": 1.01, "token_k3": 0.1, "seq_sum_k2": 0.5}},
        {
            "rollout_rs": {
                "seq_max_k3": 0.3,
                "seq_max_k2": 0.2,
                "seq_mean_k3": 0.01,
                "seq_sum_k1": 1.5,
                "token_k2": 1,
            }
        },
        {"rollout_is": "token", "threshold": 1.5, "lower": 0.7},
        {"rollout_is": "sequence", "batch_normalize": True, "micro_batch_rows": 3},
        {"rollout_is": "sequence", "threshold": 5.0, "lower": 0.2},
    ],
    "trl": [
        {},
        {"rank_rows": 2},
        {"mode": "token_truncate", "clip_min": 0.5, "rank_rows": 3},
        {"mode": "token_mask", "clip_max": 1.2},
        {"mode": "sequence_truncate", "clip_max": None, "clip_min": 0.9},
    ],
    "skyrl": [{}, {"micro_batch_rows": 2}],
    "slime": [{}, {"tis_clip_low": 0.5, "icepop": True}, {"calculate_per_token_loss": True, "tis_clip": 1.1}],
    "openrlhf": [{}, {"micro_batch_rows": 3}],
}
CASES = [(name, options) for name in FRAMEWORKS for options in OPTIONS.get(name, [{}])]


def layout(rows: Rows, width: int, fill: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    trainer, rollout = (torch.full((len(rows), width), fill, dtype=torch.float64) for _ in range(2))
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for b, row in enumerate(rows):
        for s, (t, r) in enumerate(row):
            trainer[b, s], rollout[b, s], mask[b, s] = t, r, True
    return trainer, rollout, mask


pairs = st.one_of(
    st.tuples(st.floats(-5, 0), st.floats(-0.1, 0.1)).map(lambda x: (min(x[0] + x[1], 0.0), x[0])),
    st.tuples(st.floats(-40, 0), st.floats(-40, 0)),
)


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda x: x if isinstance(x, str) else str(len(x)))
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(pairs, min_size=0, max_size=6), min_size=1, max_size=7), extra=st.integers(0, 2)
)
def test_alias_is_the_frameworks_number(name: str, options: dict, rows: Rows, extra: int) -> None:
    width = max(1, max(map(len, rows)) + extra)
    got = aliases(name, *layout(rows, width, fill=-1.0), **options)
    want = INDEPENDENT[name](rows, width, **options)
    assert got.keys() == want.keys()
    for key, value in want.items():
        if "pearson" in key and degenerate(rows):
            continue
        assert got[key] == pytest.approx(value, **tolerance(key), nan_ok=True), key


def tolerance(key: str) -> dict[str, float]:
    """Close to float64, but where the framework itself goes through float32, or subtracts squares."""
    if key.startswith(("is_ratio", "bit_wise")):
        return {"rel": 3e-6, "abs": 1e-5}
    if "pearson" in key or key.endswith("_std"):
        return {"rel": 1e-4, "abs": 1e-7}
    if "fraction" in key or "oob" in key:
        return {"rel": 1e-6, "abs": 0}
    return {"rel": 1e-7, "abs": 1e-9}


def degenerate(rows: Rows) -> bool:
    flat = [pair for row in rows for pair in row]
    sides = ([exp(t) for t, _ in flat], [exp(r) for _, r in flat])
    return len(flat) < 2 or any(statistics.pstdev(side) < 1e-6 for side in sides)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_float32_as_the_frameworks_have_it(name: str) -> None:
    torch.manual_seed(0)
    rollout = -torch.rand(6, 50) * 4
    trainer = (rollout + 0.05 * torch.randn(6, 50)).clamp(max=0)
    mask = torch.rand(6, 50) < torch.rand(6, 1)
    mask[:, 0] = True
    wide = aliases(name, trainer.double(), rollout.double(), mask)
    for key, value in aliases(name, trainer, rollout, mask).items():
        assert value == pytest.approx(wide[key], rel=2e-4, abs=2e-6), key


def test_wrong_use_is_refused() -> None:
    x = -torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"framework must be one of megatron_rl, nemo_rl, .*, got 'roll'"):
        aliases("roll", x, x, torch.ones(2, 3))
    with pytest.raises(
        ValueError, match=r"must begin with token, seq_sum, seq_mean or seq_max, got 'seq_median'"
    ):
        aliases("verl", x, x, torch.ones(2, 3), rollout_rs={"seq_median_k2": 1.0})
    with pytest.raises(ValueError, match="the bound of k3 must be one number"):
        aliases("verl", x, x, torch.ones(2, 3), rollout_rs={"token_k3": (0.1, 0.2)})
    with pytest.raises(ValueError, match=r"must be \[B, S\] of one shape, got \[2, 3\], \[2, 3\], \[6\]"):
        aliases("trl", x, x, torch.ones(6))


# What is wrong with them: each defect shown, with the monitor's number beside it.


def ours(trainer, rollout, mask) -> dict[str, float]:
    monitor = DriftMonitor()
    monitor.update(trainer, rollout, mask, step=0)
    return monitor.compute()


def test_means_of_micro_batches_weigh_short_answers_more() -> None:
    """verl in the actor, TRL over ranks, OpenRLHF: 1 token of -1 against 9 of 0."""
    rows: Rows = [[(-2.0, -1.0)], [(-1.0, -1.0)] * 9]
    args = layout(rows, 9, -1.0)
    assert ours(*args)["kl/k1"] == pytest.approx(0.1)
    assert aliases("verl", *args, micro_batch_rows=1)["rollout_corr/kl"] == pytest.approx(0.5)
    assert aliases("openrlhf", *args, micro_batch_rows=1)["vllm_kl"] == pytest.approx(0.5)
    assert aliases("trl", *args, rank_rows=1)["sampling/sampling_logp_difference/mean"] == pytest.approx(0.5)
    assert aliases("slime", *args)["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.5)
    assert ours(*args)["sequence/abs_mean"] == pytest.approx(0.5), "that is the mean of samples' means"


def test_a_maximum_after_clipping_saturates() -> None:
    args = layout([[(-1.0, -6.0), (-1.0, -1.0)]], 2, -1.0)
    assert aliases("verl", *args, rollout_is="token")["rollout_corr/rollout_is_max"] == 2.0
    ratio = aliases("trl", *args, mode="token_truncate")["sampling/importance_sampling_ratio/max"]
    assert ratio == 3.0
    masked = aliases("trl", *args, mode="token_mask")["sampling/importance_sampling_ratio/max"]
    assert masked == 1.0, "masking hides the token altogether"
    assert ours(*args)["ratio/max"] == pytest.approx(exp(5))


def test_padding_becomes_the_minimum_and_the_spread() -> None:
    args = layout([[(-1.0, -1.5), (-1.0, -1.5)]], 4, -1.0)
    got = aliases("skyrl", *args)
    assert got["is_ratio_min"] == 0.0 and got["is_ratio_std"] > 0.9
    assert ours(*args)["ratio/min"] == pytest.approx(exp(0.5))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("openrlhf", "vllm_kl"),
        ("nemo_rl", "gen_kl_error"),
        ("skyrl", "is_ratio_mean"),
        ("slime", "train/tis"),
    ],
)
def test_multiplying_with_the_mask_lets_a_nan_through(name: str, key: str) -> None:
    args = layout([[(-1.0, -1.5)]], 2, math.nan)
    assert math.isnan(aliases(name, *args)[key])
    assert ours(*args)["dlogp/mean"] == 0.5


def test_missing_values_look_perfect() -> None:
    nothing = layout([[], []], 2, -1.0)
    assert aliases("prime_rl", *nothing)["trainer_mismatch_kl"] == 0.0
    assert aliases("trl", *nothing)["sampling/sampling_logp_difference/max"] == 0.0
    assert "kl/k3" not in ours(*nothing)
    # Megatron takes the trainer's own value for a token that the engine did not score
    trainer, rollout, mask = layout([[(-1.0, -1.5), (-3.0, -9.0)]], 2, -1.0)
    returned = torch.tensor([[True, False]])
    got = aliases("megatron_rl", trainer, rollout, mask, returned=returned)
    assert got["mean_piold_to_inf_prob"] == pytest.approx((exp(0.5) + 1) / 2)
    # torchtitan drops what is not finite and does not say so
    rollout[0, 1] = math.nan
    assert aliases("torchtitan", trainer, rollout, mask)["bit_wise/logprob_diff/mean"] == 0.5
    assert ours(trainer, rollout, mask)["coverage"] == 0.5


def test_probability_space_hides_what_happens_to_rare_tokens() -> None:
    args = layout([[(-12.0, -8.0)] * 10], 10, -1.0)
    assert aliases("verl", *args)["training/rollout_probs_diff_mean"] < 0.005, "normal, says verl's guide"
    assert ours(*args)["dlogp/abs_mean"] == 4.0


def test_signed_means_cancel() -> None:
    args = layout([[(-1.0, -2.0), (-2.0, -1.0)]], 2, -1.0)
    assert aliases("torchtitan", *args)["bit_wise/logprob_diff/mean"] == 0
    assert aliases("openrlhf", *args)["vllm_kl"] == 0
    assert ours(*args)["dlogp/abs_mean"] == 1


def test_verls_chi2_of_sequences_is_negative_where_a_divergence_is_not() -> None:
    """verl #7242: -0.88; the mean of squares minus 1 is no divergence unless the mean is 1."""
    args = layout([[(-2.0, -1.0)], [(-2.5, -1.0)]], 1, -1.0)
    assert aliases("verl", *args)["rollout_corr/chi2_seq"] < -0.8
    assert ours(*args)["chi2"] > 0


def test_sequence_sums_grow_with_length() -> None:
    """TRL #5814: ratios of 0.4 to 0.7 although the tokens' mean is next to nothing."""
    args = layout([[(-1.01, -1.0)] * 80], 80, -1.0)
    ratio = aliases("trl", *args)["sampling/importance_sampling_ratio/mean"]
    assert ratio == pytest.approx(exp(-0.8)) and ours(*args)[
        "sequence/geometric_ratio_mean"
    ] == pytest.approx(exp(-0.01))

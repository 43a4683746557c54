"""Each alias against an implementation in plain Python that shares no code with it, and what is wrong with the numbers."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_attn_plugin.monitor import DriftMonitor
from rl_attn_plugin.monitor.aliases import FRAMEWORKS, aliases

Rows = list[list[tuple[float, float]]]  # (trainer, rollout) of the active tokens of each row
exp = math.exp


def k3(x: float) -> float:
    return exp(x) - 1 - x


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(values) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def std(values) -> float:
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 else math.nan


def verl(
    rows: Rows,
    padding: int,
    *,
    rollout_is=None,
    threshold=2.0,
    lower=None,
    batch_normalize=False,
    rollout_rs=None,
    micro_batch_rows=None,
) -> dict:
    flat = [pair for row in rows for pair in row]
    if not flat:
        nan = math.nan
        return {"training/rollout_probs_diff_valid": 0.0} | dict.fromkeys(
            [f"training/rollout_probs_diff_{x}" for x in ("max", "mean", "std")]
            + ["training/rollout_actor_probs_pearson_corr"],
            nan,
        )
    p, q = [exp(t) for t, _ in flat], [exp(r) for _, r in flat]
    apart = [abs(a - b) for a, b in zip(p, q, strict=True)]
    found = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": max(apart),
        "training/rollout_probs_diff_mean": mean(apart),
        "training/rollout_probs_diff_std": std(apart),
        "training/rollout_actor_probs_pearson_corr": correlation(p, q),
    }
    size = micro_batch_rows or len(rows)
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    numbers = [
        off_policy(part)
        | is_weights(part, rollout_is, threshold, lower, batch_normalize)
        | rejections(part, rollout_rs)
        for part in parts
        if any(part)
    ]
    return found | {f"rollout_corr/{key}": mean(part[key] for part in numbers) for key in numbers[0]}


def correlation(p: list[float], q: list[float]) -> float:
    if len(p) < 2:
        return math.nan
    a, b = mean(p), mean(q)
    top = math.fsum((x - a) * (y - b) for x, y in zip(p, q, strict=True))
    bottom = math.sqrt(math.fsum((x - a) ** 2 for x in p) * math.fsum((y - b) ** 2 for y in q))
    return top / bottom if bottom else math.nan


def off_policy(rows: Rows) -> dict:
    flat = [t - r for row in rows for t, r in row]
    # a row without tokens has mean 0 and perplexity 1, and counts
    t_mean = [math.fsum(t for t, _ in row) / max(len(row), 1) for row in rows]
    r_mean = [math.fsum(r for _, r in row) / max(len(row), 1) for row in rows]
    apart = [b - a for a, b in zip(t_mean, r_mean, strict=True)]
    return {
        "training_ppl": mean(exp(-x) for x in t_mean),
        "training_log_ppl": mean(-x for x in t_mean),
        "kl": -mean(flat),
        "k3_kl": mean(k3(d) for d in flat),
        "rollout_ppl": mean(exp(-x) for x in r_mean),
        "rollout_log_ppl": mean(-x for x in r_mean),
        "log_ppl_diff": mean(apart),
        "log_ppl_abs_diff": mean(abs(x) for x in apart),
        "log_ppl_diff_max": max(apart),
        "log_ppl_diff_min": min(apart),
        "ppl_ratio": mean(exp(x) for x in apart),
        "chi2_token": mean(exp(clamp(d, -20, 20)) ** 2 for d in flat) - 1,
        "chi2_seq": mean(exp(2 * clamp(math.fsum(t - r for t, r in row), -20, 20)) for row in rows) - 1,
    }


def rejections(rows: Rows, rules: dict | None) -> dict:
    if rules is None:
        return {}
    found, thrown = {}, [[False] * len(row) for row in rows]
    for option, bound in rules.items():
        how, name = option.rsplit("_", 1)
        d = [[clamp(t - r, -20, 20) for t, r in row] for row in rows]
        k = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": k3}[name]
        tokens = [[k(x) for x in row] for row in d]
        of_row = {"token": mean, "seq_sum": math.fsum, "seq_mean": mean, "seq_max": max}[how]
        seqs = [of_row(row) for row in tokens if row]
        stats = tokens if how == "token" else [[of_row(row)] * len(row) if row else [] for row in tokens]
        low, high = -math.inf, bound
        if name == "k1":
            low, high = map(math.log, bound if isinstance(bound, tuple) else (1 / bound, bound))
        flat = [x for row in stats for x in row]
        values = flat if how == "token" else seqs
        out = [[not low <= x <= high for x in row] for row in stats]
        thrown = [[a or b for a, b in zip(x, y, strict=True)] for x, y in zip(thrown, out, strict=True)]
        bounded = [clamp(x, low if name == "k1" else 0, high) for x in flat]
        numbers = {
            "mean": mean(flat),
            "max": max(values),
            "min": min(values),
            "fraction_high": mean(x > high for x in values),
            "fraction_low": mean(x < low for x in values),
            "std": statistics.pstdev(bounded),
            "seq_mean": mean(seqs),
            "seq_std": std(seqs) if len(seqs) > 1 else 0.0,
            "seq_max": max(seqs),
            "seq_min": min(seqs),
            "seq_max_deviation": max(map(abs, seqs)),
            "seq_fraction_high": mean(x > high for x in seqs),
            "masked_fraction": mean(x for row in out for x in row),
            "seq_masked_fraction": mean(any(row) for row in out if row),
        }
        if name == "k1":
            numbers["seq_fraction_low"] = mean(x < low for x in seqs)
        found |= {f"rollout_rs_{option}_{key}": value for key, value in numbers.items()}
    found["rollout_rs_masked_fraction"] = mean(x for row in thrown for x in row)
    found["rollout_rs_seq_masked_fraction"] = mean(any(row) for row in thrown)
    return found


def is_weights(rows: Rows, level: str | None, upper: float, lower: float | None, normalize: bool) -> dict:
    if level is None:
        return {}

    def weight(w: float) -> float:
        return min(w, upper) if lower is None else w if lower <= w <= upper else 0.0

    sums = [math.fsum(t - r for t, r in row) for row in rows]
    logs = [[s if level == "sequence" else t - r for t, r in row] for row, s in zip(rows, sums, strict=True)]
    raw = [[exp(clamp(x, -20, 20)) for x in row] for row in logs]
    used = [[weight(w) for w in row] for row in raw]
    flat_raw, flat = [w for row in raw for w in row], [w for row in used for w in row]
    low = 1 / upper if lower is None else lower
    row_mean = [mean(row) if row else 0.0 for row in used]
    raw_mean = [mean(row) if row else 0.0 for row in raw]
    found = {
        "rollout_is_mean": mean(flat),
        "rollout_is_max": max(flat),
        "rollout_is_min": min(flat),
        "rollout_is_ratio_fraction_high": mean(w > upper for w in flat_raw),
        "rollout_is_ratio_fraction_low": mean(w < low for w in flat_raw),
        "rollout_is_std": statistics.pstdev(flat),
        # verl divides by zero and raises where all weights are masked
        "rollout_is_eff_sample_size": (mean(flat) + 1e-8) ** 2 / mean(w * w for w in flat)
        if any(flat)
        else math.inf,
        "rollout_is_seq_mean": mean(row_mean),
        "rollout_is_seq_std": std(row_mean) if len(rows) > 1 else 0.0,
        "rollout_is_seq_max": max(row_mean),
        "rollout_is_seq_min": min(row_mean),
        "rollout_is_seq_max_deviation": max(abs(w - 1) for w in row_mean),
        "rollout_is_seq_fraction_high": mean(w > upper for w in raw_mean),
        "rollout_is_seq_fraction_low": mean(w < low for w in raw_mean),
    }
    if level == "sequence":
        found |= {
            "rollout_is_max": exp(min(max(sums), 20)),
            "rollout_is_min": exp(min(sums)),
            "rollout_is_ratio_fraction_high": mean(s > math.log(upper) for s in sums),
            "rollout_is_ratio_fraction_low": mean(s < math.log(low) for s in sums),
        }
    if normalize:
        factor = mean(flat) if level == "token" else mean(mean(row) for row in used if row)
        found["rollout_is_batch_norm_factor"] = factor if factor > 1e-8 else 1.0
    if lower is not None:
        found["rollout_is_oob_ratio"] = mean(not lower <= w <= upper for w in flat_raw)
    return found


def trl(
    rows: Rows, padding: int, *, mode="sequence_mask", clip_min=None, clip_max=3.0, rank_rows=None
) -> dict:
    size = rank_rows or len(rows)
    ranks = []
    for i in range(0, len(rows), size):
        part = rows[i : i + size]
        d = [t - r for row in part for t, r in row]
        logs = [math.fsum(t - r for t, r in row) for row in part] if mode.startswith("sequence") else d
        low, high = (
            (-math.inf if clip_min is None else clip_min),
            (math.inf if clip_max is None else clip_max),
        )
        ratios = [
            clamp(w, low, high) if mode.endswith("truncate") else w if low <= w <= high else 0.0
            for w in map(exp, logs)
        ]
        ranks.append(
            [mean(map(abs, d)) if d else 0, max(map(abs, d), default=0)]
            + ([min(ratios), mean(ratios), max(ratios)] if ratios else [0, 0, 0])
        )
    columns = list(zip(*ranks, strict=True))
    return {
        "sampling/sampling_logp_difference/mean": mean(columns[0]),
        "sampling/sampling_logp_difference/max": max(columns[1]),
        "sampling/importance_sampling_ratio/min": min(columns[2]),
        "sampling/importance_sampling_ratio/mean": mean(columns[3]),
        "sampling/importance_sampling_ratio/max": max(columns[4]),
    }


def nemo_rl(rows: Rows, padding: int) -> dict:
    flat = [pair for row in rows for pair in row]
    total = len(flat) + 1e-8

    def js(t: float, r: float) -> float:
        middle = math.log((exp(t) + exp(r)) / 2)
        return (k3(t - middle) + k3(r - middle)) / 2

    errors = [mean(exp(abs(t - r)) for t, r in row) for row in rows if row] or [0.0]
    return {
        "token_mult_prob_error": math.fsum(exp(abs(t - r)) for t, r in flat) / total,
        "gen_kl_error": math.fsum(k3(t - r) for t, r in flat) / total,
        "policy_kl_error": math.fsum(k3(r - t) for t, r in flat) / total,
        "js_divergence_error": math.fsum(js(t, r) for t, r in flat) / total,
        "sampling_importance_ratio": math.fsum(exp(t - r) for t, r in flat) / total,
        "max_seq_mult_prob_error": max(errors),
        "mean_seq_mult_prob_error": mean(errors),
        "min_seq_mult_prob_error": min(errors),
    }


def skyrl(rows: Rows, padding: int, *, micro_batch_rows=None) -> dict:
    """``padding``: the width of the rows; padded tokens count as 0."""
    width, size = padding, micro_batch_rows or len(rows)
    apart = [abs(t - r) for row in rows for t, r in row]
    found = {}
    if apart:
        prefix = "policy/rollout_train_logprobs_abs_diff"
        found = {f"{prefix}_max": max(apart), f"{prefix}_min": min(apart), f"{prefix}_mean": mean(apart)}
        found[f"{prefix}_std"] = std(apart)
    parts = []
    for i in range(0, len(rows), size):
        part = rows[i : i + size]
        zeros = [0.0] * sum(width - len(row) for row in part)
        d = [t - r for row in part for t, r in row]
        ratio = [exp(clamp(x, -20, 20)) for x in d]
        n = max(len(d), 1)
        parts.append(
            {
                "mean": math.fsum(map(abs, d)) / n,
                "square": math.fsum(x * x for x in d) / n,
                "max": max([abs(x) for x in d] + zeros),
                "min": min([abs(x) for x in d] + zeros),
                "ratio_mean": math.fsum(ratio) / n,
                "ratio_std": std(ratio + zeros),
                "ratio_max": max(ratio + zeros),
                "ratio_min": min(ratio + zeros),
            }
        )
    m, s = mean(p["mean"] for p in parts), mean(p["square"] for p in parts)
    prefix = "policy/minibatch_rollout_logprobs_abs_diff"
    return found | {
        f"{prefix}_mean": m,
        f"{prefix}_std": math.sqrt(max(0.0, s - m * m)),
        f"{prefix}_max": max(p["max"] for p in parts),
        f"{prefix}_min": min(p["min"] for p in parts),
        "is_ratio_mean": mean(p["ratio_mean"] for p in parts),
        "is_ratio_std": mean(p["ratio_std"] for p in parts),
        "is_ratio_max": max(p["ratio_max"] for p in parts),
        "is_ratio_min": min(p["ratio_min"] for p in parts),
    }


def slime(
    rows: Rows, padding: int, *, tis_clip=2.0, tis_clip_low=0.0, icepop=False, calculate_per_token_loss=False
):
    def reduced(f) -> float:
        sums = [math.fsum(f(t - r) for t, r in row) for row in rows]
        counts = [max(len(row), 1) for row in rows]
        if calculate_per_token_loss:
            return math.fsum(sums) / sum(counts)
        return mean(s / n for s, n in zip(sums, counts, strict=True))

    def changed(d: float) -> bool:
        inside = tis_clip_low <= exp(d) <= tis_clip
        return not inside and not (icepop and exp(d) == 0)

    return {
        "train/train_rollout_logprob_abs_diff": reduced(abs),
        "train/tis": reduced(exp),
        "train/tis_clipfrac": reduced(changed),
        "train/tis_abs": reduced(lambda d: abs(exp(d) - 1)),
    }


def prime_rl(rows: Rows, padding: int) -> dict:
    kls = [k3(t - r) for row in rows for t, r in row]
    values = [math.nan] * 5
    if kls:
        values = [mean(kls), statistics.median_low(kls), std(kls), min(kls), max(kls)]
    names = ("mean", "median", "std", "min", "max")
    found = {f"mismatch_kl/all/{name}": value for name, value in zip(names, values, strict=True)}
    return found | {"trainer_mismatch_kl": mean(kls) if kls else 0.0}


def openrlhf(rows: Rows, padding: int, *, micro_batch_rows=None) -> dict:
    size = micro_batch_rows or len(rows)
    parts = [[r - t for row in rows[i : i + size] for t, r in row] for i in range(0, len(rows), size)]
    return {"vllm_kl": mean(mean(part) if part else math.nan for part in parts)}


def torchtitan(rows: Rows, padding: int, *, ratio_clip_low=0.2, ratio_clip_high=0.2) -> dict:
    d = [t - r for row in rows for t, r in row if math.isfinite(r)]
    n = max(len(d), 1)
    ratio = [exp(clamp(x, -10, 10)) for x in d]
    return {
        "bit_wise/logprob_diff/mean": math.fsum(d) / n,
        "bit_wise/logprob_diff/max": max(map(abs, d), default=0.0),
        "bit_wise/ratio_tokens_different/mean": sum(abs(x) > 1e-6 for x in d) / n,
        "loss/ratio_mean": math.fsum(ratio) / n,
        "loss/ratio_clipped_frac": sum(w < 0.8 - 1e-6 or w > 1.2 + 1e-6 for w in ratio) / n,
    }


def megatron_rl(rows: Rows, padding: int) -> dict:
    flat = [pair for row in rows for pair in row]
    if not flat:
        return {}
    columns = {
        "piold_to_inf_prob": [exp(t - r) for t, r in flat],
        "inf_train_prob_abs_diff": [abs(exp(t) - exp(r)) for t, r in flat],
        "inf_prob": [exp(r) for _, r in flat],
    }
    return {f"{how.__name__}_{name}": how(x) for name, x in columns.items() for how in (min, max, mean)}


INDEPENDENT = {
    "verl": verl,
    "trl": trl,
    "nemo_rl": nemo_rl,
    "skyrl": skyrl,
    "slime": slime,
    "prime_rl": prime_rl,
    "openrlhf": openrlhf,
    "torchtitan": torchtitan,
    "megatron_rl": megatron_rl,
}
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

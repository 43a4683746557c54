"""The frameworks' own numbers in plain Python, which shares no code with the aliases."""

from __future__ import annotations

import math
import statistics

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

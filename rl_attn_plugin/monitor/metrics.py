"""From a state to named numbers. Every formula is in docs/metrics.md; what cannot be told has no key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from rl_attn_plugin.monitor.quantiles import BINS, COARSE_BINS, coarse_middle, middle, quantile
from rl_attn_plugin.monitor.settings import Settings
from rl_attn_plugin.monitor.state import COUNTS, MAXIMA, SEGMENTS, SUMS, State
from rl_attn_plugin.monitor.tables import table_bins
from rl_attn_plugin.monitor.validity import KINDS, SIDES

_MIDDLES = [middle(index) for index in range(BINS)]
_COARSE_MIDDLES = [coarse_middle(index) for index in range(COARSE_BINS)]
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True, slots=True)
class Bin:
    """dlogp of the tokens in one bin of a table.

    Attributes:
        label: of the bin.
        low: first position or lower edge of the probability; None for groups.
        high: last position or upper edge; None for groups and where there is no end.
        count: compared tokens.
        mean: mean dlogp, nats.
        abs_mean: mean abs(dlogp).
        abs_p50: median of abs(dlogp), within 6.3 %, as the others.
        abs_p95: 95 % quantile.
        abs_p99: 99 % quantile.
        abs_max: largest abs(dlogp).
    """

    label: str
    low: float | None
    high: float | None
    count: int
    mean: float
    abs_mean: float
    abs_p50: float
    abs_p95: float
    abs_p99: float
    abs_max: float


def metrics(state: State) -> dict[str, float]:
    """All scalar metrics of a state on the CPU."""
    counts = dict(zip(COUNTS, state.counts.tolist(), strict=True))
    found: dict[str, float] = {
        f"tokens/{name}": float(counts[name])
        for name in ("active", "compared", "bit_equal", "over_threshold", "prob_over_half")
    }
    found.update({f"invalid/{kind}": float(counts[f"invalid_{kind}"]) for kind in _kinds()})
    for name in ("updates", "updates_refused", "updates_empty"):
        found["updates/" + (name.partition("_")[2] or "count")] = float(counts[name])
    if counts["active"]:
        found["coverage"] = counts["compared"] / counts["active"]
    if counts["compared"]:
        found.update(_tokens(state, counts))
    for name in SEGMENTS:
        found.update(_segments(name, state, counts))
    return found


def _kinds() -> list[str]:
    return [*(f"{side}_{kind}" for side in SIDES for kind in KINDS), "mask", "shape"]


def _tokens(state: State, counts: dict[str, int]) -> dict[str, float]:
    n = counts["compared"]
    sums, maxima = (
        dict(zip(SUMS, state.sums.tolist(), strict=True)),
        dict(zip(MAXIMA, state.maxima.tolist(), strict=True)),
    )
    mean, square = (sums["d"] + sums["d_rest"]) / n, sums["square"] / n
    largest = max(maxima["d"], maxima["-d"])
    by_size = state.histogram.sum(0).tolist()
    found = {
        "dlogp/mean": mean,
        "dlogp/abs_mean": sums["abs"] / n,
        "dlogp/rms": math.sqrt(square),
        **{
            f"dlogp/abs_{name}": min(_quantile(by_size, _MIDDLES, q), largest)
            for name, q in QUANTILES.items()
        },
        "dlogp/abs_max": largest,
        "dlogp/min": -maxima["-d"],
        "dlogp/max": maxima["d"],
        "kl/k1": -mean,
        "kl/k2": square / 2,
        "kl/k3": sums["k3"] / n,
        "ratio/min": _exp(-maxima["-d"]),
        "ratio/mean": _scaled_mean(state, 0, maxima["d"], n),
        "ratio/max": _exp(maxima["d"]),
        "chi2": sums["chi2"] / n,
        "ess": _ess(state, 0, n),
        "clip/above": counts["clip_above"] / n,
        "clip/below": counts["clip_below"] / n,
        "clip/truncated_mean": sums["truncated"] / n,
        "clip/masked_mean": sums["masked"] / n,
        "prob/abs_mean": sums["prob_abs"] / n,
        "prob/abs_max": maxima["prob_abs"],
        "ppl/trainer": _exp(-sums["logp_trainer"] / n),
        "ppl/rollout": _exp(-sums["logp_rollout"] / n),
        "ppl/ratio": _exp(-mean),
    }
    pearson = _pearson(n, sums)
    if pearson is not None:
        found["prob/pearson"] = pearson
    return found


def _segments(name: str, state: State, counts: dict[str, int]) -> dict[str, float]:
    n, incomplete = counts[f"{name}_count"], counts[f"{name}_incomplete"]
    if n + incomplete == 0:
        return {}
    found = {f"{name}/count": float(n), f"{name}/incomplete": float(incomplete)}
    if n == 0:
        return found
    sums, maxima = (
        dict(zip(SUMS, state.sums.tolist(), strict=True)),
        dict(zip(MAXIMA, state.maxima.tolist(), strict=True)),
    )
    row = 1 + SEGMENTS.index(name)

    def mean(key: str) -> float:
        return float(sums[f"{name}_{key}"]) / n

    found |= {
        f"{name}/log_ratio_mean": mean("d") + mean("d_rest"),
        f"{name}/log_ratio_abs_mean": mean("abs"),
        f"{name}/log_ratio_min": -maxima[f"-{name}"],
        f"{name}/log_ratio_max": maxima[name],
        f"{name}/ratio_mean": _scaled_mean(state, row, maxima[name], n),
        f"{name}/ess": _ess(state, row, n),
        f"{name}/mean_dlogp_mean": mean("mean") + mean("mean_rest"),
        f"{name}/mean_dlogp_abs_mean": mean("mean_abs"),
        f"{name}/mean_dlogp_min": -maxima[f"-{name}_mean"],
        f"{name}/mean_dlogp_max": maxima[f"{name}_mean"],
        f"{name}/abs_mean": mean("abs_mean"),
        f"{name}/geometric_ratio_mean": mean("geometric"),
        f"{name}/prob_over_half": counts[f"{name}_prob_over_half"] / n,
        f"{name}/clip_above": counts[f"{name}_clip_above"] / n,
        f"{name}/clip_below": counts[f"{name}_clip_below"] / n,
        f"{name}/truncated_mean": mean("truncated"),
        f"{name}/masked_mean": mean("masked"),
    }
    return found


def table(state: State, settings: Settings, name: str) -> list[Bin]:
    """The bins of a table that hold tokens.

    Args:
        state: on the CPU.
        settings: of the monitor.
        name: ``position``, ``probability`` or a group.

    Raises:
        ValueError: there is no such table.
    """
    tables = table_bins(settings)
    if name not in tables:
        raise ValueError(f"the table must be one of {', '.join(tables)}, got {name!r}")
    rows = zip(
        tables[name],
        state.table_counts[name].tolist(),
        state.table_sums[name].tolist(),
        state.table_maxima[name].tolist(),
        strict=True,
    )
    found = []
    for (label, low, high), counts, (total, absolute), largest in rows:
        n = sum(counts)
        if n:
            p50, p95, p99 = (min(_quantile(counts, _COARSE_MIDDLES, q), largest) for q in (0.5, 0.95, 0.99))
            found.append(Bin(label, low, high, n, total / n, absolute / n, p50, p95, p99, largest))
    return found


def coarse_mean_square(counts: list[int]) -> float:
    """Mean of dlogp^2 from a table's bins, within 13 %."""
    squares = sum(n * middle * middle for n, middle in zip(counts, _COARSE_MIDDLES, strict=True))
    return squares / sum(counts)


def _quantile(counts: list[int], middles: list[float], q: float) -> float:
    found = quantile(counts, middles, q)
    assert found is not None
    return found


def _scaled_mean(state: State, row: int, largest: float, n: int) -> float:
    """Mean of exp(x): the sum is kept relative to the largest x."""
    return _exp(largest + math.log(float(state.scaled[row, 0]) / n))


def _ess(state: State, row: int, n: int) -> float:
    """(sum w)^2 / (n sum w^2): the scale cancels."""
    total, square = state.scaled[row].tolist()
    return float(total * total / (n * square))


def _pearson(n: int, sums: dict[str, float]) -> float | None:
    """Correlation from exact sums; None without spread. Fractions, because the products nearly cancel."""

    def total(name: str) -> Fraction:
        return Fraction(sums[f"prob_{name}"]) + Fraction(sums[f"prob_{name}_rest"])

    a, b = total("trainer"), total("rollout")
    variance_a, variance_b = n * total("trainer_square") - a * a, n * total("rollout_square") - b * b
    # a spread below what the products are rounded to is none
    floor = Fraction(n * n, 2**46)
    if variance_a <= floor or variance_b <= floor:
        return None
    covariance = float((n * total("product") - a * b) / (n * n))
    return covariance / (math.sqrt(variance_a / (n * n)) * math.sqrt(variance_b / (n * n)))


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf

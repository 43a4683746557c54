"""Statistics of signed differences and of log-prob pairs. numpy only; every formula stands beside its name.

Sign and units everywhere: ``dlogp = logp_trainer - logp_rollout`` in nats. Samples come from the rollout, so
the divergences are KL(rollout || trainer), estimated from the sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DriftStats:
    """Statistics of signed differences d.

    Attributes:
        active_count: how many differences.
        bit_equal: how many are exactly 0.
        mean: mean of d.
        mean_abs: mean of abs(d).
        rms: sqrt(mean(d^2)).
        p50_abs: median of abs(d), by linear interpolation between order statistics, as all quantiles.
        p95_abs: 95 % quantile of abs(d).
        p99_abs: 99 % quantile of abs(d).
        p999_abs: 99.9 % quantile of abs(d).
        max_abs: largest abs(d).
    """

    active_count: int
    bit_equal: int
    mean: float | None
    mean_abs: float | None
    rms: float | None
    p50_abs: float | None
    p95_abs: float | None
    p99_abs: float | None
    p999_abs: float | None
    max_abs: float | None


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """How far two policies are apart on the sampled tokens, from d = dlogp. None without tokens, and where
    exp(d) overflows.

    Attributes:
        kl_k1: mean(-d), unbiased and signed.
        kl_k2: mean(d^2 / 2).
        kl_k3: mean(exp(d) - 1 - d), never negative.
        ratio_min: smallest exp(d).
        ratio_mean: mean exp(d).
        ratio_max: largest exp(d).
        ess: effective sample size share, (sum w)^2 / (n sum w^2) with w = exp(d); 1 is on-policy.
        prob_mean_abs: mean abs(exp(logp_trainer) - exp(logp_rollout)).
        prob_max_abs: the largest such difference.
    """

    kl_k1: float | None
    kl_k2: float | None
    kl_k3: float | None
    ratio_min: float | None
    ratio_mean: float | None
    ratio_max: float | None
    ess: float | None
    prob_mean_abs: float | None
    prob_max_abs: float | None


def difference(left: Floats, right: Floats) -> Floats:
    """``left - right`` in float64, where equal values differ by 0 even when both are ``-inf``."""
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(left == right, 0.0, left - right)


def drift_stats(d: Floats) -> DriftStats:
    """Statistics of finite differences; with none of them every number but the counts is None.

    Quantiles are exact: the whole array is sorted, so there is no limit on its size.

    Raises:
        ValueError: when a difference is not finite; see `invalid_counts`.
    """
    d = np.asarray(d, np.float64).ravel()
    if not np.isfinite(d).all():
        raise ValueError(f"differences must be finite, got {int((~np.isfinite(d)).sum())} that are not")
    if d.size == 0:
        return DriftStats(0, 0, *(None,) * 8)
    size = np.sort(np.abs(d))
    p50, p95, p99, p999 = (_quantile(size, q) for q in (0.5, 0.95, 0.99, 0.999))
    return DriftStats(
        active_count=d.size,
        bit_equal=int((d == 0).sum()),
        mean=float(d.mean()),
        mean_abs=float(size.mean()),
        rms=float(np.sqrt((d * d).mean())),
        p50_abs=p50,
        p95_abs=p95,
        p99_abs=p99,
        p999_abs=p999,
        max_abs=float(size[-1]),
    )


def _quantile(ascending: Floats, q: float) -> float:
    at = q * (ascending.size - 1)
    low = int(at)
    high = min(low + 1, ascending.size - 1)
    return float(ascending[low] + (at - low) * (ascending[high] - ascending[low]))


def policy_stats(logp_trainer: Floats, logp_rollout: Floats) -> PolicyStats:
    """Divergences and ratios of finite log-prob pairs; all None without a pair."""
    trainer, rollout = np.asarray(logp_trainer, np.float64), np.asarray(logp_rollout, np.float64)
    if trainer.size == 0:
        return PolicyStats(*(None,) * 9)
    d = difference(trainer, rollout)
    with np.errstate(over="ignore"):  # a ratio that overflows cannot be told, see _finite
        w = np.exp(d)
        k3 = np.expm1(d) - d
        shift = np.exp(d - d.max())  # the ratio of sums is free of scale
    apart = np.abs(np.exp(trainer) - np.exp(rollout))
    return PolicyStats(
        kl_k1=float(-d.mean()),
        kl_k2=float((d * d).mean() / 2),
        kl_k3=_finite(k3.mean()),
        ratio_min=_finite(w.min()),
        ratio_mean=_finite(w.mean()),
        ratio_max=_finite(w.max()),
        ess=float(shift.sum() ** 2 / (d.size * (shift * shift).sum())),
        prob_mean_abs=float(apart.mean()),
        prob_max_abs=float(apart.max()),
    )


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def invalid_counts(logp_trainer: Floats, logp_rollout: Floats) -> dict[str, int]:
    """Values that no number may be averaged from, by side and kind; kinds that do not occur are left out."""
    trainer, rollout = np.asarray(logp_trainer, np.float64), np.asarray(logp_rollout, np.float64)
    kinds: dict[str, Any] = {
        "trainer_nan": np.isnan(trainer),
        "rollout_nan": np.isnan(rollout),
        "trainer_inf": np.isinf(trainer),
        "rollout_inf": np.isinf(rollout),
        "trainer_positive": np.isfinite(trainer) & (trainer > 0),
        "rollout_positive": np.isfinite(rollout) & (rollout > 0),
    }
    return {kind: int(rows.sum()) for kind, rows in kinds.items() if rows.any()}


def valid_rows(logp_trainer: Floats, logp_rollout: Floats) -> NDArray[np.bool_]:
    """Rows whose two log-probs are finite and not positive."""
    trainer, rollout = np.asarray(logp_trainer, np.float64), np.asarray(logp_rollout, np.float64)
    return np.isfinite(trainer) & np.isfinite(rollout) & (trainer <= 0) & (rollout <= 0)

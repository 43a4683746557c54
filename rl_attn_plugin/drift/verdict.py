"""PASS, DRIFT, INCONCLUSIVE or INVALID, with reasons in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from rl_attn_plugin.drift.stats import DriftStats, PolicyStats

Verdict = Literal["PASS", "DRIFT", "INCONCLUSIVE", "INVALID"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """Bounds above which drift is called DRIFT; applied to the arm under test, trainer against recorded.

    They tell rounding noise from a fault, and are meant for bf16. Values seen elsewhere: verl's guide takes
    a mean probability difference up to 0.005 as normal and above 0.01 as a precision problem; prime-rl
    merges only below a k3 of 0.015; published stable runs of slime and vime on Qwen3-8B sit at a mean
    abs(dlogp) of 0.011 to 0.012, and the CI of Miles allows 0.03 between the means, that of SkyRL 0.07 to
    0.09; IcePop saw runs collapse beyond 0.05.
    """

    mean_abs: float = 0.05
    """Mean abs(dlogp), nats: where IcePop saw runs collapse. Clean bf16 weights show 0.01 to 0.03: the smaller
    the model and the more unlikely the tokens it takes, the more."""
    prob_mean_abs: float = 0.01
    """Mean abs(p_trainer - p_rollout): verl's bound for a precision problem."""
    kl_k3: float = 0.005
    """k3 estimate of KL(rollout || trainer): a third of prime-rl's bound, which admits stale weights."""
    prob_max_abs: float = 0.5
    """Largest abs(p_trainer - p_rollout) of any token: means hide a few broken tokens (Yao et al. 2025 count
    responses with a token beyond 0.5: 1 of 512 in a sound setup, tens where parallelism differs)."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not value >= 0:
                raise ValueError(f"threshold {item.name} must be at least 0, got {value}")


@dataclass(frozen=True, slots=True)
class Check:
    """One number held against its bound.

    Attributes:
        name: of the bound in `Thresholds`.
        label: in words.
        value: the number; None (it overflowed) is above any bound.
        bound: the largest value that passes.
    """

    name: str
    label: str
    value: float | None
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the value is within the bound."""
        return self.value is not None and self.value <= self.bound

    def __str__(self) -> str:
        value = "beyond what a float holds" if self.value is None else f"{self.value:.3g}"
        return f"{self.label} is {value}, {'within' if self.passed else 'above'} {self.bound:g}"


def checks(stats: DriftStats, policy: PolicyStats, thresholds: Thresholds) -> list[Check]:
    """The numbers that decide between PASS and DRIFT, each with its bound; none without tokens."""
    if not stats.active_count:
        return []
    return [
        Check("mean_abs", "mean |dlogp|", stats.mean_abs, thresholds.mean_abs),
        Check("prob_mean_abs", "mean |Δp|", policy.prob_mean_abs, thresholds.prob_mean_abs),
        Check("kl_k3", "KL (k3)", policy.kl_k3, thresholds.kl_k3),
        Check("prob_max_abs", "max |Δp|", policy.prob_max_abs, thresholds.prob_max_abs),
    ]


def judge(
    stats: DriftStats,
    policy: PolicyStats,
    invalid: dict[str, int],
    problems: list[str],
    thresholds: Thresholds,
    min_tokens: int,
) -> tuple[Verdict, list[str]]:
    """The verdict of one arm and why.

    Args:
        stats: of dlogp, trainer against recorded, over valid rows.
        policy: of the same rows.
        invalid: from `invalid_counts`, over every row of the run.
        problems: what the run should hold and does not, or contradicts, in words.
        thresholds: bounds.
        min_tokens: fewer compared tokens are INCONCLUSIVE.
    """
    reasons = list(problems)
    if invalid:
        listed = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in invalid.items())
        reasons.append(f"log-probs that are not log-probs: {listed}")
    if reasons:
        return "INVALID", reasons
    if stats.active_count < min_tokens:
        return "INCONCLUSIVE", [f"only {stats.active_count} tokens compared, {min_tokens} needed"]
    made = checks(stats, policy, thresholds)
    over = sorted((check for check in made if not check.passed), key=_excess, reverse=True)
    if over:
        return "DRIFT", [str(check) for check in over]
    return "PASS", [str(check) for check in made]


def _excess(check: Check) -> float:
    if check.value is None or check.bound == 0:
        return math.inf
    return check.value / check.bound

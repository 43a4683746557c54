"""PASS, DRIFT, INCONCLUSIVE or INVALID, with reasons in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_attn_plugin.drift.stats import DriftStats, PolicyStats

Verdict = Literal["PASS", "DRIFT", "INCONCLUSIVE", "INVALID"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """Bounds above which drift is called DRIFT; applied to the arm under test, trainer against recorded.

    They tell rounding noise from a fault, and are meant for bf16. Values seen elsewhere: verl's guide takes
    a mean probability difference up to 0.005 as normal and above 0.01 as a precision problem; prime-rl
    merges only below a k3 of 0.015; published stable runs of slime and vime on Qwen3-8B sit at a mean
    abs(dlogp) of 0.011 to 0.012; SkyRL's CI allows 0.07 to 0.09.
    """

    mean_abs: float = 0.03
    """Mean abs(dlogp), nats: about three times what stable bf16 runs show."""
    prob_mean_abs: float = 0.01
    """Mean abs(p_trainer - p_rollout): verl's bound for a precision problem."""
    kl_k3: float = 0.005
    """k3 estimate of KL(rollout || trainer): a third of prime-rl's bound, which admits stale weights."""

    def __post_init__(self) -> None:
        for name in ("mean_abs", "prob_mean_abs", "kl_k3"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"threshold {name} must be at least 0, got {value}")


def judge(
    stats: DriftStats,
    policy: PolicyStats,
    invalid: dict[str, int],
    missing: list[str],
    thresholds: Thresholds,
    min_tokens: int,
) -> tuple[Verdict, list[str]]:
    """The verdict of one arm and why.

    Args:
        stats: of dlogp, trainer against recorded, over valid rows.
        policy: of the same rows.
        invalid: from `invalid_counts`, over every row of the run.
        missing: what the run should hold and does not, in words.
        thresholds: bounds.
        min_tokens: fewer compared tokens are INCONCLUSIVE.
    """
    if missing:
        return "INVALID", missing
    if invalid:
        listed = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in invalid.items())
        return "INVALID", [f"log-probs that are not log-probs: {listed}"]
    if stats.active_count < min_tokens:
        return "INCONCLUSIVE", [f"only {stats.active_count} tokens compared, {min_tokens} needed"]
    over = []
    for name, value, bound in (
        ("mean |dlogp|", stats.mean_abs, thresholds.mean_abs),
        ("mean |p_trainer - p_rollout|", policy.prob_mean_abs, thresholds.prob_mean_abs),
        ("KL k3", policy.kl_k3, thresholds.kl_k3),
    ):
        if value is not None and value > bound:
            over.append(f"{name} is {value:.4g}, above {bound:.4g}")
    if over:
        return "DRIFT", over
    return "PASS", [
        f"mean |dlogp| is {stats.mean_abs:.4g}, within {thresholds.mean_abs:.4g}; "
        f"KL k3 is {policy.kl_k3:.4g}, within {thresholds.kl_k3:.4g}"
    ]

"""What a run found, as plain values that survive JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rl_attn_plugin.drift.curves import Histogram, PositionBin, ProbabilityBin
from rl_attn_plugin.drift.stats import DriftStats, PolicyStats
from rl_attn_plugin.drift.telescope import Contrast
from rl_attn_plugin.drift.verdict import Thresholds, Verdict
from rl_attn_plugin.drift.worst import WorstToken

SCHEMA = "rl-attn/drift/1"
SIGN = "dlogp = logp_trainer - logp_rollout, nats"


@dataclass(frozen=True, slots=True)
class PathDrift:
    """One rollout path against the trainer's full prefill.

    Attributes:
        dlogp: statistics of the difference.
        policy: divergences and ratios.
    """

    dlogp: DriftStats
    policy: PolicyStats


@dataclass(frozen=True, slots=True)
class ArmDrift:
    """One arm: native or plugin attention on both sides.

    Attributes:
        paths: by path name.
        steps: by step name; their signed values add up to trainer minus recorded, token by token.
        step_share: each step's share of the sum of mean abs values, the drift it owns; None without drift.
        histogram: signed dlogp, trainer against recorded.
        by_position: abs(dlogp) along the completion, trainer against recorded.
        by_probability: abs(dlogp) by the rollout's probability of the token, trainer against recorded.
    """

    paths: dict[str, PathDrift]
    steps: dict[str, DriftStats]
    step_share: dict[str, float | None]
    histogram: Histogram
    by_position: list[PositionBin]
    by_probability: list[ProbabilityBin]


@dataclass(frozen=True, slots=True)
class DriftReport:
    """What a run found.

    Attributes:
        verdict: of the arm under test.
        reasons: why, in words.
        arm_under_test: the arm that is judged; the others inform.
        thresholds: what it was judged by.
        min_tokens: fewer compared tokens are INCONCLUSIVE.
        invalid: log-probs that are none, by kind, counted in every arm and path; their tokens are left out
            of every number.
        arms: by name; an arm that lacks a path is left out.
        attention: native against plugin arm on the same tokens, by step and in total; empty without both.
        worst: tokens of the arm under test, largest abs(dlogp) first.
        schema: of the JSON.
        sign: of every difference.
    """

    verdict: Verdict
    reasons: list[str]
    arm_under_test: str
    thresholds: Thresholds
    min_tokens: int
    invalid: dict[str, int]
    arms: dict[str, ArmDrift]
    attention: dict[str, Contrast]
    worst: list[WorstToken]
    schema: str = field(default=SCHEMA)
    sign: str = field(default=SIGN)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what cannot be told is None. There is no NaN and no infinity."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DriftReport:
        """The inverse of `to_dict`.

        Raises:
            ValueError: when the data has another schema.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"a drift report must have schema {SCHEMA!r}, got {data.get('schema')!r}")
        return cls(
            **{
                **data,
                "thresholds": Thresholds(**data["thresholds"]),
                "arms": {name: _arm(arm) for name, arm in data["arms"].items()},
                "attention": {name: Contrast(**found) for name, found in data["attention"].items()},
                "worst": [WorstToken(**token) for token in data["worst"]],
            }
        )


def _arm(data: dict[str, Any]) -> ArmDrift:
    return ArmDrift(
        paths={
            name: PathDrift(DriftStats(**path["dlogp"]), PolicyStats(**path["policy"]))
            for name, path in data["paths"].items()
        },
        steps={name: DriftStats(**step) for name, step in data["steps"].items()},
        step_share=data["step_share"],
        histogram=Histogram(**data["histogram"]),
        by_position=[PositionBin(**found) for found in data["by_position"]],
        by_probability=[ProbabilityBin(**found) for found in data["by_probability"]],
    )

"""From the token table of a run to its report: statistics, telescoped steps, contrast of arms, verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_attn_plugin.drift.curves import Histogram, PositionBin, by_position, histogram
from rl_attn_plugin.drift.stats import (
    DriftStats,
    Floats,
    PolicyStats,
    difference,
    drift_stats,
    invalid_counts,
    policy_stats,
    valid_rows,
)
from rl_attn_plugin.drift.tokens import PATHS, Scores, split_arms
from rl_attn_plugin.drift.verdict import Thresholds, Verdict, judge

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = "rl-attn/drift/1"
SIGN = "dlogp = logp_trainer - logp_rollout, nats"
# full - recorded, cut at what lies between: the three differences add up to it exactly
STEPS = ("full_minus_chunked", "chunked_minus_decode_replay", "decode_replay_minus_recorded")
_WORST = 20
_CONTEXT = 12  # completion tokens shown on either side of a worst token


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
    """

    paths: dict[str, PathDrift]
    steps: dict[str, DriftStats]
    step_share: dict[str, float | None]
    histogram: Histogram
    by_position: list[PositionBin]


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A token with a large abs(dlogp), trainer against recorded, in the arm under test.

    Attributes:
        sample: its sample.
        position: index in prompt and completion.
        token_id: the token.
        text: the token decoded.
        before: completion text right before it.
        after: completion text right after it.
        logp_trainer: of the arm under test.
        logp_rollout: recorded.
        dlogp: their difference.
        other_arm_dlogp: the same token in the other arm, or None.
        steps: the signed steps of this token.
    """

    sample: int
    position: int
    token_id: int
    text: str
    before: str
    after: str
    logp_trainer: float
    logp_rollout: float
    dlogp: float
    other_arm_dlogp: float | None
    steps: dict[str, float]


@dataclass(frozen=True, slots=True)
class DriftReport:
    """What a run found.

    Attributes:
        verdict: of the arm under test.
        reasons: why, in words.
        arm_under_test: the arm that is judged; the others inform.
        thresholds: what it was judged by.
        min_tokens: fewer compared tokens are INCONCLUSIVE.
        invalid: rows left out of every number, by kind.
        arms: by name.
        attention_share: 1 - plugin's mean abs(dlogp) over native's: how much of the native drift goes away
            with the attention; None when it cannot be told.
        worst: largest first.
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
    attention_share: float | None
    worst: list[WorstToken]
    schema: str = field(default=SCHEMA)
    sign: str = field(default=SIGN)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what is not finite becomes a string (``"inf"``), never NaN."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DriftReport:
        """The inverse of `to_dict`.

        Raises:
            ValueError: when the data has another schema.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"a drift report must have schema {SCHEMA!r}, got {data.get('schema')!r}")
        data = _parsed(data)
        arms = {name: _arm_from(arm) for name, arm in data["arms"].items()}
        worst = [WorstToken(**token) for token in data["worst"]]
        return cls(**{**data, "thresholds": Thresholds(**data["thresholds"]), "arms": arms, "worst": worst})


def summarize(
    table: pa.Table, *, arm_under_test: str, thresholds: Thresholds, min_tokens: int
) -> DriftReport:
    """Everything the report says, from the token table alone.

    Args:
        table: one row a token, arm and path; see the documentation of the run directory.
        arm_under_test: whose verdict it is.
        thresholds: bounds of the verdict.
        min_tokens: fewer compared tokens are INCONCLUSIVE.
    """
    scores, missing = split_arms(table)
    if table.num_rows and arm_under_test not in scores:
        missing.append(f"the run holds no tokens of arm {arm_under_test}")
    invalid: dict[str, int] = {}
    for arm in scores.values():
        for path in arm.paths.values():
            for kind, count in invalid_counts(arm.trainer, path).items():
                invalid[kind] = invalid.get(kind, 0) + count

    complete = {name: arm for name, arm in scores.items() if len(arm.paths) == len(PATHS)}
    kept = {name: _valid(arm) for name, arm in complete.items()}
    reach = max(
        (float(np.abs(_recorded(arm)[rows]).max(initial=0.0)) for (name, arm), rows in _rows(complete, kept)),
        default=0.0,
    )
    arms = {name: _arm(arm, kept[name], reach) for name, arm in complete.items()}
    tested = arms.get(arm_under_test)
    stats = tested.paths["recorded"].dlogp if tested else drift_stats(np.zeros(0))
    policy = tested.paths["recorded"].policy if tested else policy_stats(np.zeros(0), np.zeros(0))
    verdict, reasons = judge(stats, policy, invalid, missing, thresholds, min_tokens)
    return DriftReport(
        verdict=verdict,
        reasons=reasons,
        arm_under_test=arm_under_test,
        thresholds=thresholds,
        min_tokens=min_tokens,
        invalid=invalid,
        arms=arms,
        attention_share=_attention_share(arms),
        worst=_worst(complete, kept, arm_under_test),
    )


def _rows(complete: dict[str, Scores], kept: dict[str, Any]) -> Any:
    return [((name, arm), kept[name]) for name, arm in complete.items()]


def _recorded(arm: Scores) -> Floats:
    return difference(arm.trainer, arm.paths["recorded"])


def _valid(arm: Scores) -> Any:
    rows = np.ones(arm.trainer.shape, dtype=bool)
    for path in arm.paths.values():
        rows &= valid_rows(arm.trainer, path)
    return rows


def steps(arm: Scores) -> dict[str, Floats]:
    """The telescoped differences of each token; they add up to trainer minus recorded."""
    chunked, replay, recorded = (arm.paths[p] for p in ("chunked_prefill", "decode_replay", "recorded"))
    values = (difference(arm.trainer, chunked), difference(chunked, replay), difference(replay, recorded))
    return dict(zip(STEPS, values, strict=True))


def _arm(arm: Scores, rows: Any, reach: float) -> ArmDrift:
    paths = {
        name: PathDrift(
            drift_stats(difference(arm.trainer, path)[rows]), policy_stats(arm.trainer[rows], path[rows])
        )
        for name, path in arm.paths.items()
    }
    by_step = {name: drift_stats(d[rows]) for name, d in steps(arm).items()}
    total = sum(s.mean_abs or 0.0 for s in by_step.values())
    share = {name: (s.mean_abs or 0.0) / total if total else None for name, s in by_step.items()}
    d = _recorded(arm)[rows]
    return ArmDrift(paths, by_step, share, histogram(d, reach), by_position(d, arm.offset[rows]))


def _attention_share(arms: dict[str, ArmDrift]) -> float | None:
    if not {"native", "plugin"} <= arms.keys():
        return None
    native, plugin = (arms[name].paths["recorded"].dlogp.mean_abs for name in ("native", "plugin"))
    return None if not native or plugin is None else 1 - plugin / native


def _worst(complete: dict[str, Scores], kept: dict[str, Any], arm_under_test: str) -> list[WorstToken]:
    arm = complete.get(arm_under_test)
    if arm is None:
        return []
    others = [a for name, a in complete.items() if name != arm_under_test]
    elsewhere = {
        (int(s), int(p)): float(d)
        for other in others
        for s, p, d in zip(other.sample, other.position, _recorded(other), strict=True)
    }
    d, by_step = _recorded(arm), steps(arm)
    rows = np.flatnonzero(kept[arm_under_test])
    rows = rows[np.argsort(-np.abs(d[rows]), kind="stable")][:_WORST]
    found = []
    for row in rows.tolist():
        same = np.flatnonzero(arm.sample == arm.sample[row])  # ascending positions
        at = int(np.searchsorted(same, row))
        key = (int(arm.sample[row]), int(arm.position[row]))
        found.append(
            WorstToken(
                sample=key[0],
                position=key[1],
                token_id=int(arm.token_id[row]),
                text=arm.text[row],
                before="".join(arm.text[i] for i in same[max(0, at - _CONTEXT) : at]),
                after="".join(arm.text[i] for i in same[at + 1 : at + 1 + _CONTEXT]),
                logp_trainer=float(arm.trainer[row]),
                logp_rollout=float(arm.paths["recorded"][row]),
                dlogp=float(d[row]),
                other_arm_dlogp=elsewhere.get(key),
                steps={name: float(values[row]) for name, values in by_step.items()},
            )
        )
    return found


def _arm_from(data: dict[str, Any]) -> ArmDrift:
    return ArmDrift(
        paths={
            name: PathDrift(DriftStats(**path["dlogp"]), PolicyStats(**path["policy"]))
            for name, path in data["paths"].items()
        },
        steps={name: DriftStats(**step) for name, step in data["steps"].items()},
        step_share=data["step_share"],
        histogram=Histogram(**data["histogram"]),
        by_position=[PositionBin(**b) for b in data["by_position"]],
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value


def _parsed(value: Any) -> Any:
    if isinstance(value, dict):
        # texts may spell "inf": only numbers are parsed back
        texts = ("text", "before", "after")
        return {key: item if key in texts else _parsed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_parsed(item) for item in value]
    return float(value) if value in ("inf", "-inf", "nan") else value

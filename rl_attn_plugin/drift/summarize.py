"""From the token table of a run to its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rl_attn_plugin.drift.curves import by_position, by_probability, histogram, histogram_reach
from rl_attn_plugin.drift.result import ArmDrift, DriftReport, PathDrift
from rl_attn_plugin.drift.stats import difference, drift_stats, invalid_counts, policy_stats, valid_rows
from rl_attn_plugin.drift.telescope import TOTAL, Contrast, contrast, steps, total
from rl_attn_plugin.drift.tokens import ARMS, PATHS, Scores, split_arms
from rl_attn_plugin.drift.verdict import Thresholds, judge
from rl_attn_plugin.drift.worst import worst_tokens

if TYPE_CHECKING:
    import pyarrow as pa


def summarize(
    table: pa.Table,
    *,
    arm_under_test: str,
    thresholds: Thresholds,
    min_tokens: int,
    arms: Sequence[str] = ARMS,
) -> DriftReport:
    """Everything the report says, from the token table alone.

    A table without rows is INCONCLUSIVE. A missing arm, path or token, contradictory rows and log-probs
    that are none make it INVALID; what can still be computed is in the report.

    Args:
        table: one row a token, arm and path; see the documentation of the run directory.
        arm_under_test: whose verdict it is.
        thresholds: bounds of the verdict.
        min_tokens: fewer compared tokens are INCONCLUSIVE.
        arms: arms that the run must hold.

    Raises:
        ValueError: the table lacks a column.
    """
    expected = tuple(dict.fromkeys((*arms, arm_under_test)))
    scores, problems = split_arms(table, expected)
    invalid: dict[str, int] = {}
    for arm in scores.values():
        rollouts = np.concatenate([np.zeros(0), *arm.paths.values()])
        for kind, count in invalid_counts(arm.trainer, rollouts).items():
            invalid[kind] = invalid.get(kind, 0) + count

    whole = {name: arm for name, arm in scores.items() if len(arm.paths) == len(PATHS)}
    rows = {name: _valid(arm) for name, arm in whole.items()}
    reach = histogram_reach(*(total(arm)[rows[name]] for name, arm in whole.items()))
    found = {name: _arm(arm, rows[name], reach) for name, arm in whole.items()}

    tested = found.get(arm_under_test)
    stats = tested.paths["recorded"].dlogp if tested else drift_stats(np.zeros(0))
    policy = tested.paths["recorded"].policy if tested else policy_stats(np.zeros(0), np.zeros(0))
    verdict, reasons = judge(stats, policy, invalid, problems, thresholds, min_tokens)
    others = {
        name: (arm, rows[name])
        for name, arm in whole.items()
        if name != arm_under_test and arm_under_test in whole and arm.same_tokens(whole[arm_under_test])
    }
    return DriftReport(
        verdict=verdict,
        reasons=reasons,
        arm_under_test=arm_under_test,
        thresholds=thresholds,
        min_tokens=min_tokens,
        invalid=invalid,
        arms=found,
        attention=_attention(whole, rows),
        worst=worst_tokens(whole[arm_under_test], rows[arm_under_test], others) if tested else [],
    )


def _valid(arm: Scores) -> NDArray[np.bool_]:
    rows = np.ones(arm.trainer.shape, dtype=bool)
    for path in arm.paths.values():
        rows &= valid_rows(arm.trainer, path)
    return rows


def _arm(arm: Scores, rows: NDArray[np.bool_], reach: float) -> ArmDrift:
    paths = {
        name: PathDrift(
            drift_stats(difference(arm.trainer, path)[rows]), policy_stats(arm.trainer[rows], path[rows])
        )
        for name, path in arm.paths.items()
    }
    by_step = {name: drift_stats(d[rows]) for name, d in steps(arm).items()}
    all_steps = sum(step.mean_abs or 0.0 for step in by_step.values())
    d = total(arm)[rows]
    return ArmDrift(
        paths=paths,
        steps=by_step,
        step_share={
            name: (step.mean_abs or 0.0) / all_steps if all_steps else None for name, step in by_step.items()
        },
        histogram=histogram(d, reach),
        by_position=by_position(d, arm.offset[rows]),
        by_probability=by_probability(d, arm.paths["recorded"][rows]),
    )


def _attention(whole: dict[str, Scores], rows: dict[str, NDArray[np.bool_]]) -> dict[str, Contrast]:
    if not {"native", "plugin"} <= whole.keys():
        return {}
    native, plugin = whole["native"], whole["plugin"]
    if not native.same_tokens(plugin):
        return {}
    both = rows["native"] & rows["plugin"]
    sample = native.sample[both]
    ours, theirs = steps(native) | {TOTAL: total(native)}, steps(plugin) | {TOTAL: total(plugin)}
    return {name: contrast(ours[name][both], theirs[name][both], sample) for name in ours}

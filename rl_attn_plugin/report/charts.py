"""The numbers behind the page's charts, as plain JSON values. The drawing is in ``templates/report.js``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rl_attn_plugin.drift import STEPS, DriftReport
from rl_attn_plugin.drift.curves import PROBABILITY_EDGES
from rl_attn_plugin.drift.stats import valid_rows
from rl_attn_plugin.report.words import STEP_LABELS, visible

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_POINTS = 2000  # in a scatter plot; more make the page slow and show nothing new


def chart_data(report: DriftReport, table: pa.Table) -> dict[str, Any]:
    """What the charts draw: per arm histogram, positions, probabilities, steps, and points.

    Args:
        report: of the run.
        table: its token table, for the points.
    """
    return {
        "armUnderTest": report.arm_under_test,
        "probabilityEdges": PROBABILITY_EDGES,
        "steps": [STEP_LABELS[step] for step in STEPS],
        "arms": [
            {
                "name": name,
                "steps": [arm.steps[step].mean_abs for step in STEPS],
                "shares": [arm.step_share[step] for step in STEPS],
                "histogram": {
                    "edges": arm.histogram.edges,
                    "counts": arm.histogram.counts,
                    "zeros": arm.histogram.zeros,
                    "beyond": arm.histogram.beyond,
                },
                "position": [[b.first, b.last, b.count, b.mean_abs, b.max_abs] for b in arm.by_position],
                "probability": [[b.low, b.high, b.count, b.mean_abs, b.max_abs] for b in arm.by_probability],
                "points": _points(table, name),
            }
            for name, arm in report.arms.items()
        ],
    }


def _points(table: pa.Table, arm: str) -> dict[str, Any]:
    """Both probabilities of each token, recorded path; of many tokens those with the largest differences,
    and evenly spread ones of the rest."""
    import pyarrow.compute as pc

    rows = table.filter(pc.and_(pc.equal(table["arm"], arm), pc.equal(table["path"], "recorded")))
    rows = rows.sort_by([("sample", "ascending"), ("position", "ascending")])
    trainer, rollout = (
        np.asarray(rows[name].to_numpy(), np.float64) for name in ("logp_trainer", "logp_rollout")
    )
    valid = np.flatnonzero(valid_rows(trainer, rollout))
    shown = valid
    if valid.size > _MOST_POINTS:
        ranked = valid[np.argsort(-np.abs(trainer - rollout)[valid], kind="stable")]
        worst, rest = ranked[: _MOST_POINTS // 2], np.sort(ranked[_MOST_POINTS // 2 :])
        spread = np.linspace(0, rest.size - 1, _MOST_POINTS - worst.size).astype(np.int64)
        shown = np.sort(np.concatenate([worst, rest[spread]]))
    kept = rows.take(shown)
    return {
        "trainer": np.exp(trainer[shown]).round(6).tolist(),
        "rollout": np.exp(rollout[shown]).round(6).tolist(),
        "dlogp": (trainer - rollout)[shown].round(6).tolist(),
        "text": [visible(text) for text in kept["text"].to_pylist()],
        "sample": kept["sample"].to_pylist(),
        "position": kept["position"].to_pylist(),
        "all": int(valid.size),
    }

"""Drift of files as one HTML page, under the rules of `page`."""

from __future__ import annotations

import math
from typing import Any

from rl_attn_plugin.drift.curves import PROBABILITY_EDGES
from rl_attn_plugin.monitor import Bin
from rl_attn_plugin.offline import DriftFilesReport, RunDrift
from rl_attn_plugin.report import drift_files, page, words

_BARS_PER_DECADE = 10  # of the histogram
_SMALLEST = 1e-9  # nats; what is smaller is drawn there, with the exact zeros named in words
_MOST_ROWS = 400  # of a table of a group or of steps, so that a page of a long run stays light
_MOST_PROBLEMS = 200


def render_drift_files_html(report: DriftFilesReport) -> str:
    """The page as text.

    Raises:
        ImportError: jinja2 or plotly is missing.
    """
    run, against = report.run, report.against
    runs = [run, against] if against else [run]
    compared = any(each.metrics.get("tokens/compared") for each in runs)
    return page.render(
        "drift_files",
        verdict=run.verdict,
        data=chart_data(runs),
        draws=compared,
        styles=("report", "drift_files"),
        filters={
            "count": lambda value: words.number(int(value)),
            "context": drift_files.in_context,
            "probability": lambda logp: words.number(drift_files.probability(logp)),
            "place": drift_files.place_of,
        },
        report=report,
        run=run,
        against=against,
        runs=runs,
        say=drift_files,
        compared=compared,
        steps=run.steps[:_MOST_ROWS],
        groups=[_group(name, runs) for name in run.tables if name not in ("position", "probability")],
        largest=max((abs(token.dlogp) for token in run.worst), default=0.0),
        metrics=_metrics(runs),
        most_problems=_MOST_PROBLEMS,
        created=report.created.replace("T", " ").replace("+00:00", " UTC"),
        provenance=page.flat(report.provenance),
    )


def chart_data(runs: list[RunDrift]) -> dict[str, Any]:
    """What the charts draw, as plain JSON values; None where a number is not finite or cannot be told."""
    run = runs[0]
    return {
        "probabilityEdges": PROBABILITY_EDGES,
        "checks": [
            {"metric": check.metric, "bound": _finite(check.bound), "below": check.below}
            for check in run.checks
        ],
        "runs": [
            {
                "name": words.visible(each.name),
                "steps": [step.step for step in each.steps],
                "firing": [step.firing for step in each.steps],
                "series": {
                    check.metric: [_finite(step.metrics.get(check.metric)) for step in each.steps]
                    for check in run.checks
                },
                "histogram": histogram(each),
                **{name: _curve(each.tables.get(name, [])) for name in ("position", "probability")},
            }
            for each in runs
        ],
    }


def _curve(bins: list[Bin]) -> list[list[float | str | None]]:
    return [[b.low, b.high, b.count, b.abs_mean, b.abs_p99, b.label] for b in bins]


def histogram(run: RunDrift) -> dict[str, Any]:
    """abs(dlogp) in tenths of decades: the lower edge of each bar as a power of ten, and the tokens with dlogp >= 0 and
    below 0 in it. Bins of the monitor, a hundred times finer, go whole to where their middle lies."""
    up: dict[int, int] = {}
    down: dict[int, int] = {}
    for i, (positive, negative) in enumerate(zip(run.positive, run.negative, strict=True)):
        if i == 0 or not positive + negative:
            continue
        low = run.edges[i - 1]
        high = run.edges[i] if i < len(run.edges) else low
        middle = max(math.sqrt(low) * math.sqrt(high), _SMALLEST)  # the product could overflow
        bar = math.floor(math.log10(middle) * _BARS_PER_DECADE)
        up[bar] = up.get(bar, 0) + positive
        down[bar] = down.get(bar, 0) + negative
    bars = range(min(up), max(up) + 1) if up else range(0)
    return {
        "low": [bar / _BARS_PER_DECADE for bar in bars],
        "width": 1 / _BARS_PER_DECADE,
        "positive": [up.get(bar, 0) for bar in bars],
        "negative": [down.get(bar, 0) for bar in bars],
        "zeros": run.positive[0] + run.negative[0] if run.positive else 0,
    }


def _group(name: str, runs: list[RunDrift]) -> dict[str, Any]:
    """A table of a group: each bin of the run and the other run's with its label; drifting most first where they are
    more than a page shows."""
    bins = runs[0].tables[name]
    other = {found.label: found for each in runs[1:] for found in each.tables.get(name, [])}
    shown = bins if len(bins) <= _MOST_ROWS else sorted(bins, key=lambda found: -found.abs_mean)[:_MOST_ROWS]
    rows: list[tuple[Bin, Bin | None]] = [(found, other.get(found.label)) for found in shown]
    return {
        "name": name,
        "rows": rows,
        "left_out": len(bins) - len(shown),
        "top": max((found.abs_mean for found in bins), default=0.0),
    }


def _metrics(runs: list[RunDrift]) -> list[tuple[str, list[str]]]:
    """Every metric of either run, and its value in each."""
    names = dict.fromkeys(name for each in runs for name in each.metrics)
    return [(name, [_written(each.metrics.get(name)) for each in runs]) for name in names]


def _written(value: float | None) -> str:
    if value is None:
        return words.number(None)
    return f"{int(value):,}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

"""The page's charts as plotly figures; colours and fonts are set by the page, which knows light from dark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from rl_attn_plugin.drift import DriftReport
from rl_attn_plugin.report.words import STEP_WORDS

if TYPE_CHECKING:
    import pyarrow as pa

# Okabe and Ito's palette, told apart by colour-blind readers
ARM_COLOURS = {"plugin": "#0072B2", "native": "#E69F00"}
STEP_COLOURS = dict(zip(STEP_WORDS, ("#009E73", "#CC79A7", "#56B4E9"), strict=True))
_MOST_POINTS = 3000


def all_figures(report: DriftReport, table: pa.Table) -> dict[str, Any]:
    """Figures by the id of the element they are drawn in, as plain JSON values."""
    figures = {
        "histogram": _histogram(report),
        "position": _position(report),
        "probability": _probability(report, table),
        "steps": _steps(report),
    }
    return {name: figure.to_plotly_json() for name, figure in figures.items()}


def _histogram(report: DriftReport) -> go.Figure:
    figure = go.Figure()
    for arm, drift in report.arms.items():
        edges = np.array(drift.histogram.edges)
        figure.add_bar(
            x=((edges[1:] + edges[:-1]) / 2).tolist(),
            y=drift.histogram.counts,
            width=float(edges[1] - edges[0]),
            name=arm,
            marker_color=ARM_COLOURS.get(arm),
            opacity=0.65,
            hovertemplate="%{x:.4f} nats: %{y} tokens<extra>" + arm + "</extra>",
        )
    figure.update_layout(barmode="overlay", bargap=0)
    figure.update_xaxes(title="dlogp = trainer - recorded, nats")
    figure.update_yaxes(title="tokens (log)", type="log", dtick=1)
    return figure


def _position(report: DriftReport) -> go.Figure:
    figure = go.Figure()
    for arm, drift in report.arms.items():
        middle = [(b.first + b.last) / 2 for b in drift.by_position]
        colour = ARM_COLOURS.get(arm)
        for name, values, dash in (
            ("mean", [b.mean_abs for b in drift.by_position], "solid"),
            ("max", [b.max_abs for b in drift.by_position], "dot"),
        ):
            figure.add_scatter(
                x=middle,
                y=values,
                name=f"{arm}, {name}",
                mode="lines+markers",
                line={"color": colour, "dash": dash, "width": 2},
                marker={"size": 5},
                hovertemplate="position %{x}: %{y:.4g} nats<extra>" + f"{arm}, {name}" + "</extra>",
            )
    figure.update_xaxes(title="position in the completion")
    figure.update_yaxes(title="|dlogp|, nats", rangemode="tozero")
    return figure


def _probability(report: DriftReport, table: pa.Table) -> go.Figure:
    figure = go.Figure()
    for arm in report.arms:
        rows = table.filter(
            np.logical_and(
                np.array(table["arm"].to_pylist()) == arm, np.array(table["path"].to_pylist()) == "recorded"
            )
        )
        trainer, rollout = (np.exp(rows[f"logp_{side}"].to_numpy()) for side in ("trainer", "rollout"))
        step = max(1, len(trainer) // _MOST_POINTS)  # evenly thinned: a picture, not a number
        figure.add_scatter(
            x=rollout[::step].tolist(),
            y=trainer[::step].tolist(),
            name=arm,
            mode="markers",
            marker={"color": ARM_COLOURS.get(arm), "size": 5, "opacity": 0.55},
            text=[repr(t)[1:-1].replace("<", "&lt;") for t in rows["text"].to_pylist()[::step]],
            hovertemplate="%{text}<br>rollout %{x:.4f}, trainer %{y:.4f}<extra>" + arm + "</extra>",
        )
    figure.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", name="equal", line={"width": 1, "dash": "dash", "color": "#888"},
        hoverinfo="skip",
    )  # fmt: skip
    figure.update_xaxes(title="probability when sampled", range=[-0.02, 1.02], constrain="domain")
    figure.update_yaxes(title="trainer's probability", range=[-0.02, 1.02], scaleanchor="x")
    return figure


def _steps(report: DriftReport) -> go.Figure:
    figure = go.Figure()
    arms = list(report.arms)
    for step, (name, meaning) in STEP_WORDS.items():
        figure.add_bar(
            y=arms,
            x=[report.arms[arm].steps[step].mean_abs or 0 for arm in arms],
            name=name,
            orientation="h",
            marker_color=STEP_COLOURS[step],
            hovertemplate="%{x:.4g} nats: " + meaning + "<extra>" + name + "</extra>",
        )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title="mean |step|, nats")
    return figure

"""One HTML file that needs nothing else: charts, text, styles and plotly.js are inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from plotly.offline import get_plotlyjs

from rl_attn_plugin.drift import DriftReport
from rl_attn_plugin.report.figures import ARM_COLOURS, STEP_COLOURS, all_figures
from rl_attn_plugin.report.files import write_text
from rl_attn_plugin.report.words import PATH_WORDS, STEP_WORDS, VERDICT_WORDS, number, percent

if TYPE_CHECKING:
    import pyarrow as pa


def write_html(report: DriftReport, table: pa.Table, manifest: dict[str, Any], path: Path) -> None:
    """Write ``report.html``.

    Args:
        report: what was found.
        table: the run's token table.
        manifest: the run's manifest.
        path: where to.

    Raises:
        OSError: see `write_text`.
    """
    write_text(path, render(report, table, manifest))


def render(report: DriftReport, table: pa.Table, manifest: dict[str, Any]) -> str:
    """The page as text. Everything that a model or a user wrote is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rl_attn_plugin.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, percent=percent, visible=visible, pretty=_pretty)
    tested = report.arms.get(report.arm_under_test)
    return environment.get_template("report.html.j2").render(
        report=report,
        manifest=manifest,
        tested=tested,
        arms=sorted(report.arms.items(), key=lambda item: item[0] != report.arm_under_test),
        verdict_words=VERDICT_WORDS[report.verdict],
        path_words=PATH_WORDS,
        step_words=STEP_WORDS,
        arm_colours=ARM_COLOURS,
        step_colours=STEP_COLOURS,
        figures=_script_json(all_figures(report, table) if report.arms else {}),
        plotly=get_plotlyjs(),
    )


def visible(text: str) -> str:
    """White space that a reader could not see, made visible."""
    return text.replace("\n", "\u21b5\n").replace("\t", "\u21e5")


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True, default=str)


def _script_json(value: Any) -> str:
    """JSON that is safe inside a script element: no text can close it or open a comment."""
    text = json.dumps(value, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text

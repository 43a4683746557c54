"""A comparison of one layer's ways as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_attn_plugin.replay import AttentionComparisonReport, TensorDrift
from rl_attn_plugin.report import comparison, words
from rl_attn_plugin.report.files import write_atomic
from rl_attn_plugin.report.html import _flat

_TEMPLATES = Path(__file__).parent / "templates"
# The scale of the bars: powers of ten of a difference.
_SCALE = (-9, 1)


def write_comparison_html(reports: Sequence[AttentionComparisonReport], path: Path) -> None:
    """Writes the page.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    write_atomic(path, render_comparison_html(reports))


def render_comparison_html(reports: Sequence[AttentionComparisonReport]) -> str:
    """The page as text.

    Args:
        reports: of one or several layers, at least one.

    Raises:
        ImportError: jinja2 is missing.
    """
    try:
        import jinja2
        import markupsafe
    except ModuleNotFoundError as error:
        raise ImportError(f"the HTML report needs {error.name}: pip install 'rl-attn-plugin[ray]'") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "number": words.number,
        "signed": lambda value: words.number(value, signed=True),
        "percent": words.percent,
        "visible": words.visible,
        "place": place,
        # a name may break after its underscores, and nowhere else
        "breakable": lambda name: markupsafe.escape(name).replace("_", markupsafe.Markup("_<wbr>")),
    }
    return environment.get_template("comparison.html.j2").render(
        reports=reports,
        verdict=comparison.verdict_of(reports),
        headline=comparison.headline(reports),
        reasons=comparison.reasons(reports),
        comparison=comparison,
        words=words,
        scale=range(_SCALE[0], _SCALE[1] + 1),
        flat=_provenance,
        process=_flat(reports[0].provenance),
        unavailable=list(dict.fromkeys((u.name, u.reason) for report in reports for u in report.unavailable)),
        style=(_TEMPLATES / "report.css").read_text("utf-8")
        + (_TEMPLATES / "comparison.css").read_text("utf-8"),
    )


def place(value: float | None) -> float | None:
    """Where a difference lies on the scale, in percent; None for none, 100 beyond its end."""
    if not value:
        return None
    low, high = _SCALE
    at = high if value == math.inf else math.log10(value)
    return round(100 * min(max((at - low) / (high - low), 0.0), 1.0), 1)


def _provenance(row: Any) -> list[tuple[str, str]]:
    from dataclasses import asdict

    found = {name: value for name, value in asdict(row.provenance).items() if value is not None}
    found["seconds"] = f"{row.seconds:.3f}"
    if row.check is not None:
        found["has to be"] = f"{row.check.expectation.replace('_', '-')}: {row.check.reason}"
    for part in ("out", "lse", "dlogp", "q", "k"):
        drift: TensorDrift | None = getattr(row, part)
        if drift is not None:
            found[part] = ", ".join(f"{name} {value}" for name, value in drift.to_dict().items())
    return _flat(found)

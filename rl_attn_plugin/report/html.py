"""The report as one HTML page that needs nothing else: plotly, styles and data are inside it.

Model text reaches the page in two ways: through the template, which escapes it, and as JSON inside a script
element, where ``<``, ``>`` and ``&`` are written as ``\\u003c`` and so on. A content security policy in the
page allows the two scripts by their hashes and no network at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_attn_plugin.drift import STEPS, TOTAL, DriftReport
from rl_attn_plugin.report import words
from rl_attn_plugin.report.charts import chart_data
from rl_attn_plugin.report.files import write_atomic

if TYPE_CHECKING:
    import pyarrow as pa

    from rl_attn_plugin.replay import AttentionComparisonReport

_TEMPLATES = Path(__file__).parent / "templates"
_PROMPT_SHOWN = 400  # characters of a worst token's prompt, from its end


def write_html(
    report: DriftReport,
    table: pa.Table,
    manifest: Mapping[str, Any],
    path: Path,
    comparisons: Sequence[AttentionComparisonReport] = (),
) -> None:
    """Writes ``report.html``.

    Args:
        report: what the run found.
        table: its token table.
        manifest: of the run: model, sampling, samples, configuration, provenance, timing. All of it may be
            missing.
        path: where; whole or not there.
        comparisons: of layers of the model, see `rl_attn_plugin.replay`.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    write_atomic(path, render_html(report, table, manifest, comparisons))


def render_html(
    report: DriftReport,
    table: pa.Table,
    manifest: Mapping[str, Any],
    comparisons: Sequence[AttentionComparisonReport] = (),
) -> str:
    """The page as text.

    Raises:
        ImportError: jinja2 or plotly is missing.
    """
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
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
        "lines": lambda text: "\n".join(words.visible(line) for line in text.split("\n")),
        "probability": lambda logp: words.number(math.exp(logp)),
    }
    # without an arm there is nothing to draw
    plotly_js = get_plotlyjs().replace("\r\n", "\n") if report.arms else ""
    script = (_TEMPLATES / "report.js").read_text("utf-8")
    return environment.get_template("report.html.j2").render(
        report=report,
        comparisons=comparisons,
        words=words,
        steps=STEPS,
        total=TOTAL,
        checks=words.checks_of(report),
        sampling=words.Sampling.of(manifest),
        share=words.attention_share(report),
        zero_drift=words.zero_drift(report, manifest),
        model=manifest.get("model") or {},
        created=str(manifest.get("created") or "").replace("T", " ").replace("+00:00", " UTC"),
        version=manifest.get("version"),
        prompts=_prompts(report, manifest),
        timing=_timing(manifest),
        folded=[
            (title, _flat(manifest.get(name)))
            for title, name in (
                ("Model", "model"),
                ("Configuration", "config"),
                ("Provenance", "provenance"),
                ("Timing", "timing"),
                ("Operators of the zero-drift arm", "audit"),
            )
            if manifest.get(name)
        ],
        data=_json_for_script(chart_data(report, table)),
        style=(_TEMPLATES / "report.css").read_text("utf-8"),
        script=script,
        plotly_js=plotly_js,
        policy=_policy(plotly_js, script),
    )


def _policy(*scripts: str) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    # plotly writes style elements and draws images from data addresses
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def _json_for_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in, nor start a comment there."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _prompts(report: DriftReport, manifest: Mapping[str, Any]) -> dict[int, dict[str, str]]:
    """Prompt of each sample that a worst token is from."""
    wanted = {token.sample for token in report.worst}
    found = {}
    for sample in manifest.get("samples") or []:
        if sample.get("sample") in wanted:
            text = str(sample.get("prompt_text") or "")
            shown = text if len(text) <= _PROMPT_SHOWN else f"… {text[-_PROMPT_SHOWN:]}"
            found[sample["sample"]] = {"id": str(sample.get("prompt_id") or ""), "text": shown}
    return found


def _timing(manifest: Mapping[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Tokens a second by phase, then arm; from keys ``arm/phase``."""
    rates = (manifest.get("timing") or {}).get("tokens_per_second") or {}
    phases: dict[str, dict[str, float]] = {}
    for key, rate in rates.items():
        arm, _, phase = str(key).partition("/")
        if phase and isinstance(rate, int | float):
            phases.setdefault(phase, {})[arm] = rate
    return [(phase, dict(sorted(arms.items()))) for phase, arms in phases.items()]


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings as rows of dotted names and plain values."""
    if isinstance(value, Mapping):
        return [
            row
            for key, item in value.items()
            for row in _flat(item, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(value, list):
        value = ", ".join(str(item) for item in value)
    return [(prefix, words.visible("–" if value is None else str(value)))]

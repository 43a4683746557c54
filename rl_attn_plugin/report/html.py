"""The report as one HTML page, under the rules of `page`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_attn_plugin.drift import STEPS, TOTAL, DriftReport
from rl_attn_plugin.report import page, words
from rl_attn_plugin.report.charts import chart_data
from rl_attn_plugin.report.files import write_atomic

if TYPE_CHECKING:
    import pyarrow as pa

    from rl_attn_plugin.replay import AttentionComparisonReport

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
    return page.render(
        "report",
        verdict=report.verdict,
        data=chart_data(report, table),
        draws=bool(report.arms),
        styles=("report",),
        filters={
            "lines": lambda text: "\n".join(words.visible(line) for line in text.split("\n")),
            "probability": lambda logp: words.number(math.exp(logp)),
        },
        report=report,
        comparisons=comparisons,
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
            (title, page.flat(manifest.get(name)))
            for title, name in (
                ("Model", "model"),
                ("Configuration", "config"),
                ("Provenance", "provenance"),
                ("Timing", "timing"),
                ("Operators of the zero-drift arm", "audit"),
            )
            if manifest.get(name)
        ],
    )


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

"""The report as tables in the terminal; readable at 100 columns, safe for model text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_attn_plugin.drift import TOTAL, DriftReport
from rl_attn_plugin.report.console import marked, panel, titled_table
from rl_attn_plugin.report.words import (
    PATH_LABELS,
    SIGN,
    STEP_LABELS,
    Sampling,
    attention_share,
    headline,
    interval,
    kept,
    largest,
    number,
    owner,
    percent,
    share,
    step_names,
    visible,
    zero_drift,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rl_attn_plugin.replay import AttentionComparisonReport

_WORST = 6
_WIDE = 96  # columns below which the table of statistics leaves some out
_BESIDE_CONTEXT = 56  # columns of the table of worst tokens that are not context


def print_report(
    report: DriftReport,
    console: Console,
    *,
    manifest: Mapping[str, Any] | None = None,
    comparisons: Sequence[AttentionComparisonReport] = (),
) -> None:
    """Verdict, statistics by arm and path, telescoped steps, the worst tokens, and layers that were compared.

    Args:
        report: what to print.
        console: where.
        manifest: of the run, for the model and how its tokens were drawn.
        comparisons: of layers of the model, see `rl_attn_plugin.replay`.
    """
    from rich.text import Text

    lines = Text(headline(report), style="bold")
    for reason in report.reasons:
        lines.append(f"\n• {visible(reason)}", style="not bold")
    console.print(panel(report.verdict, lines, _model(manifest)))
    if manifest is not None:
        console.print(Text(f"{Sampling.of(manifest)}.", style="dim"))
    console.print(Text(f"{SIGN}.", style="dim"))
    if report.arms:
        _print_arms(report, console, manifest)
    if comparisons:
        console.print(_layers(comparisons))
        for reason in dict.fromkeys(f"{u.name}: {u.reason}" for c in comparisons for u in c.unavailable):
            console.print(Text(f"unavailable: {visible(reason)}", style="dim"))


def _print_arms(report: DriftReport, console: Console, manifest: Mapping[str, Any] | None) -> None:
    from rich.text import Text

    console.print(_paths(report, console.width))
    console.print(_steps(report))
    for arm in report.arms:
        console.print(Text.assemble((arm, "bold"), ": ", owner(report, arm)))
    owned = attention_share(report)
    for line in ([owned] if owned else []) + zero_drift(report, manifest):
        console.print(Text(line))
    if report.worst and report.worst[0].dlogp != 0:
        console.print(_worst(report, console.width))


def _model(manifest: Mapping[str, Any] | None) -> str:
    model = (manifest or {}).get("model") or {}
    return " · ".join(str(model[name]) for name in ("name", "dtype") if model.get(name))


def _paths(report: DriftReport, width: int) -> Table:
    table = titled_table("\nTrainer (full prefill) against rollout, dlogp")
    table.add_column("arm, rollout path", no_wrap=True)
    wide = width >= _WIDE
    names = (
        "mean",
        "mean |·|",
        *(["p95 |·|"] if wide else []),
        "p99 |·|",
        "max |·|",
        *(["KL k3"] if wide else []),
    )
    for name in (*names, "bit-equal"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm, found in report.arms.items():
        style = "" if arm == report.arm_under_test else "dim"
        table.add_row(arm, style=f"bold {style}")
        for path, drift in found.paths.items():
            d = drift.dlogp
            cells = [number(d.mean, signed=True), number(d.mean_abs)]
            cells += [number(d.p95_abs)] if wide else []
            cells += [number(d.p99_abs), number(d.max_abs)]
            cells += [number(drift.policy.kl_k3)] if wide else []
            table.add_row(
                f"  {PATH_LABELS.get(path, path)}",
                *cells,
                f"{d.bit_equal}/{d.active_count}",
                style=style,
                end_section=path == list(found.paths)[-1],
            )
    return table


def _steps(report: DriftReport) -> Table:
    table = titled_table("Telescoped steps, mean |·| and share of the arm's drift")
    table.add_column("step")
    arms = {name: arm for name, arm in report.arms.items() if any(arm.step_share.values())} or report.arms
    for arm in arms:
        table.add_column(arm, justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
    if report.attention:
        table.add_column("attention's share", justify="right", no_wrap=True)
    for step in step_names(report):
        cells = []
        for found in arms.values():
            if step == TOTAL:
                cells += [number(found.paths["recorded"].dlogp.mean_abs), ""]
            else:
                cells += [number(found.steps[step].mean_abs), percent(found.step_share[step])]
        if report.attention:
            contrast = report.attention[step]
            within = interval(contrast)
            cells.append(share(contrast.share) + (f"  ({within})" if within else ""))
        table.add_row(STEP_LABELS[step], *cells, style="bold" if step == TOTAL else "")
    return table


def _layers(comparisons: Sequence[AttentionComparisonReport]) -> Table:
    table = titled_table("\nLayers of the model, every way against full prefill: largest difference")
    for name in ("layer", "path"):
        table.add_column(name, no_wrap=True)
    for name in ("out", "lse"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("has to be")
    for found in comparisons:
        rows = [row for row in found.drifts if row.reference_name == found.reference_name]
        for row in rows:
            table.add_row(
                visible(found.label) if row is rows[0] else "",
                row.name,
                largest(row.out),
                largest(row.lse),
                kept(row),
                style="red" if row.check is not None and not row.check.passed else "",
                end_section=row is rows[-1],
            )
    return table


def _worst(report: DriftReport, width: int) -> Table:
    table = titled_table(f"\nWorst tokens, arm {report.arm_under_test}")
    for name in ("dlogp", "p trainer", "p rollout", "sample", "position"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("in context", no_wrap=True, overflow="ellipsis")
    context = min(max(width - _BESIDE_CONTEXT, 12), 48)
    for token in report.worst[:_WORST]:
        table.add_row(
            number(token.dlogp, signed=True),
            *(number(math.exp(logp)) for logp in (token.logp_trainer, token.logp_rollout)),
            str(token.sample),
            str(token.position),
            marked(token.before, token.text, token.after, context, context // 2),
        )
    return table

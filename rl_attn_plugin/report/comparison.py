"""A comparison of one layer's ways in the terminal; readable at 80 columns, safe for any label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_attn_plugin.replay import AttentionComparisonReport, AttentionPathDrift
from rl_attn_plugin.report.words import kept, largest, number, percent, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STYLES = {"PASS": "green", "DRIFT": "red", "INCONCLUSIVE": "yellow"}
FP64 = "fp64_merge"
SIGN = "Differences are reference − candidate; dlogp = logp_trainer − logp_rollout, nats"
_WIDE = 96  # columns below which a table leaves some out


def verdict_of(reports: Sequence[AttentionComparisonReport]) -> str:
    """The worst verdict of several layers."""
    found = {report.verdict for report in reports}
    return next(verdict for verdict in ("DRIFT", "INCONCLUSIVE", "PASS") if verdict in found)


def headline(reports: Sequence[AttentionComparisonReport]) -> str:
    """The verdict as a sentence."""
    verdict = verdict_of(reports)
    if verdict == "PASS":
        promised = any(
            row.check and row.check.expectation == "bit_equal" for report in reports for row in report.drifts
        )
        where = "" if len(reports) == 1 else f"In {len(reports)} of {len(reports)} layers, "
        what = (
            "no way of computing a row changes a bit of it"
            if promised
            else "every way agrees within its bound"
        )
        return f"{where}{what}." if where else f"{what[0].upper()}{what[1:]}."
    if verdict == "DRIFT":
        broken = sum(row.check is not None and not row.check.passed for r in reports for row in r.drifts)
        return f"{broken} row{'s' if broken != 1 else ''} lost what {'they have' if broken != 1 else 'it has'} to keep."
    return "What was asked for could not be compared."


def reasons(reports: Sequence[AttentionComparisonReport]) -> list[str]:
    """Why it is not PASS, layer by layer."""
    return [
        f"{report.label}: {reason}"
        for report in reports
        if report.verdict != "PASS"
        for reason in report.reasons
    ]


def shape_line(report: AttentionComparisonReport) -> str:
    """The inputs in one line."""
    s = report.shapes
    options = [
        f"window {tuple(s['window'])}" if s["window"] != [-1, -1] else "",
        f"softcap {s['softcap']:g}" if s["softcap"] else "",
        "sinks" if s["sinks"] else "",
        "" if s["causal"] else "not causal",
        "rotated here" if s["rope"] else "",
        f"{s['padding']} padding" if s["padding"] else "",
    ]
    schedule = next((row.provenance.schedule_id for row in report.drifts if row.provenance.schedule_id), None)
    backend = next((row.provenance.actual_backend for row in report.drifts), "nothing")
    return ", ".join(
        filter(
            None,
            [
                f"{s['tokens']:,} tokens, {s['heads']} heads on {s['kv_heads']}, D {s['head_dim']}",
                s["dtype"], *options, f"pages of {s['kv_page_size']}", f"computed by {backend} on {s['device']}",
                f"schedule {schedule}" if schedule else "",
            ],
        )
    )  # fmt: skip


def sections(report: AttentionComparisonReport) -> list[tuple[str, list[AttentionPathDrift]]]:
    """Rows by what they tell: the ways of training and rollout, rotation, merges against fp64, other libraries."""
    ways, turned, exact, peers = [], [], [], []
    for row in report.drifts:
        if row.reference_name == FP64:
            exact.append(row)
        elif row.reference_name == "unfused_rope_attention":
            turned.append(row)
        elif row.reference_name.endswith(":prefill"):
            peers.append(row)
        else:
            ways.append(row)
    titles = (
        "The ways of training and rollout, against full prefill",
        "Rotation, against apply_rope before the attention",
        "Merges of the same partials, against fp64",
        "Other libraries: decode against their own prefill",
    )
    return [(title, rows) for title, rows in zip(titles, (ways, turned, exact, peers), strict=True) if rows]


def print_comparisons(reports: Sequence[AttentionComparisonReport], console: Console) -> None:
    """Verdict, a table a layer, and what did not run.

    Args:
        reports: of one or several layers, at least one.
        console: where.
    """
    from rich.panel import Panel
    from rich.text import Text

    verdict = verdict_of(reports)
    lines = Text(headline(reports), style="bold")
    for reason in reasons(reports)[:12]:
        lines.append(f"\n• {visible(reason)}", style="not bold")
    label = Text(f" {verdict} ", style=f"bold reverse {STYLES[verdict]}")
    console.print(Panel(lines, title=label, title_align="left", border_style=STYLES[verdict], padding=(1, 2)))
    console.print(Text(f"{SIGN}.", style="dim"))
    for report in reports:
        console.print(Text(f"\n{visible(report.label) or 'inputs'}", style="bold"))
        console.print(Text(shape_line(report), style="dim"))
        for title, rows in sections(report):
            console.print(_table(title, rows, console.width))
    for name, reason in dict.fromkeys((u.name, u.reason) for report in reports for u in report.unavailable):
        console.print(Text(f"{visible(name)} did not run: {visible(reason)}", style="dim"))


def _table(title: str, rows: list[AttentionPathDrift], width: int) -> Table:
    from rich import box
    from rich.table import Table

    wide = width >= _WIDE
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("path", overflow="fold")
    dlogp, lse, checked = (
        any(getattr(row, part) is not None for row in rows) for part in ("dlogp", "lse", "check")
    )
    names = ["out, max", *(["mean |·|", "differ"] if wide else []), *(["lse, max"] if lse else [])]
    for name in [*names, *(["|dlogp|"] if dlogp else []), *(["ms"] if wide else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    if checked:
        table.add_column("has to be", no_wrap=True)
    for row in rows:
        share = row.out.differing_count / row.out.active_count if row.out.active_count else None
        cells = [largest(row.out)]
        cells += [number(row.out.mean_abs), percent(share)] if wide else []
        cells += [largest(row.lse)] if lse else []
        cells += [largest(row.dlogp)] if dlogp else []
        cells += [f"{1000 * row.seconds:.0f}"] if wide else []
        cells += [kept(row)] if checked else []
        bad = row.check is not None and not row.check.passed
        table.add_row(visible(row.name), *cells, style="red" if bad else "")
    return table

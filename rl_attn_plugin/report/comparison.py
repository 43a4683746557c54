"""A comparison of one layer's ways: what it found, in words and groups, and all of it in the terminal.

Readable at 80 columns, safe for any label.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_attn_plugin.replay import AttentionComparisonReport, AttentionPathDrift
from rl_attn_plugin.report.console import STYLES, panel
from rl_attn_plugin.report.words import kept, largest, number, percent, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

QUESTION = "Does a row’s result depend on how it was computed?"
SIGN = "difference = reference − candidate; dlogp = logp_trainer − logp_rollout, nats"

_FP64, _UNFUSED, _FP8 = "fp64_merge", "unfused_rope_attention", "fp8_kv_cache"
_OWN_PREFILL = ":prefill"
_WIDE, _ROOMY = 98, 112  # columns below which the table leaves some out, and from which it has air
_LONG = 27  # the longest name of a path without a variant
_MOST_REASONS = 12  # in the terminal; the page has them all


@dataclass(frozen=True, slots=True)
class Groups:
    """The rows of a report by what they tell.

    Attributes:
        ways: of training and rollout, against full prefill.
        fp8: what a cache in e4m3 costs.
        rotation: inside the attention and written plainly, against the rotation before it.
        merges: of the same partials, against fp64.
        peers: other libraries' decode, each against its own prefill.
    """

    ways: list[AttentionPathDrift] = field(default_factory=list)
    fp8: list[AttentionPathDrift] = field(default_factory=list)
    rotation: list[AttentionPathDrift] = field(default_factory=list)
    merges: list[AttentionPathDrift] = field(default_factory=list)
    peers: list[AttentionPathDrift] = field(default_factory=list)

    @classmethod
    def of(cls, reports: Iterable[AttentionComparisonReport]) -> Groups:
        """The groups of one or several reports."""
        found = cls()
        for report in reports:
            for row in report.drifts:
                if row.reference_name == _FP64:
                    found.merges.append(row)
                elif row.reference_name == _UNFUSED:
                    found.rotation.append(row)
                elif row.reference_name.endswith(_OWN_PREFILL):
                    found.peers.append(row)
                else:
                    (found.fp8 if row.name == _FP8 else found.ways).append(row)
        return found


def verdict_of(reports: Sequence[AttentionComparisonReport]) -> str:
    """The worst verdict of several layers.

    Raises:
        ValueError: there is none.
    """
    found = {report.verdict for report in reports}
    for verdict in ("DRIFT", "INCONCLUSIVE", "PASS"):
        if verdict in found:
            return verdict
    raise ValueError("reports must hold at least one comparison, got none")


def headline(reports: Sequence[AttentionComparisonReport]) -> str:
    """The answer to the question, as a sentence."""
    verdict = verdict_of(reports)
    checks = [row.check for report in reports for row in report.drifts if row.check is not None]
    lost = sum(not check.passed for check in checks)
    if verdict == "PASS":
        if any(check.expectation == "bit_equal" for check in checks):
            said = "No: every way that has to give its reference’s bits gives them"
        else:
            said = "By rounding only: every way agrees within the bound of fp32 arithmetic"
        return f"{said}{_in_all(len(reports))}."
    if verdict == "DRIFT":
        has, it = ("has", "it has") if lost == 1 else ("have", "they have")
        return f"Yes: {lost} of {len(checks)} rows {has} lost what {it} to keep."
    return "Not known: what was asked for could not be compared."


def _in_all(layers: int) -> str:
    return "" if layers == 1 else f", in all {layers} layers"


def reasons(reports: Sequence[AttentionComparisonReport]) -> list[str]:
    """Why it is not PASS, layer by layer; empty if it is."""
    return [
        f"{report.label}: {reason}" if report.label else reason
        for report in reports
        if report.verdict != "PASS"
        for reason in report.reasons
    ]


def findings(reports: Sequence[AttentionComparisonReport]) -> list[str]:
    """What the rows show, in sentences: what is kept, what an fp8 cache costs, what other libraries do."""
    rows = [row for report in reports for row in report.drifts]
    lost = {row.name for row in rows if row.check is not None and not row.check.passed}
    said = []
    for expectation, word in (
        ("bit_equal", "Equal bit for bit"),
        ("within", "Within the bound of fp32 rounding"),
    ):
        names = dict.fromkeys(
            row.name for row in rows if row.check is not None and row.check.expectation == expectation
        )
        if held := [name for name in names if name not in lost]:
            said.append(f"{word}: {', '.join(held)}.")
    groups = Groups.of(reports)
    if groups.fp8:
        scored = [
            row.dlogp.mean_abs
            for row in groups.fp8
            if row.dlogp is not None and row.dlogp.mean_abs is not None
        ]
        cost = f"; mean |dlogp| is {number(max(scored))} nats" if scored else ""
        said.append(f"A cache in fp8 moves out by up to {_most(groups.fp8)}{cost}.")
    if groups.peers:
        by_name: dict[str, list[AttentionPathDrift]] = {}
        for row in groups.peers:
            by_name.setdefault(row.name.removesuffix(":decode"), []).append(row)
        found = [f"{name} {_most(rows)}" for name, rows in by_name.items()]
        said.append(
            f"Other libraries’ decode against their own prefill, largest difference: {', '.join(found)}."
        )
    return said


def _most(rows: list[AttentionPathDrift]) -> str:
    """The largest difference of ``out`` over layers."""
    return largest(max((row.out for row in rows), key=lambda out: out.max_abs or 0.0))


def shape_line(report: AttentionComparisonReport) -> str:
    """The inputs in one line."""
    s = report.shapes
    d = f"D {s['head_dim']}" + (f", Dv {s['v_head_dim']}" if s["v_head_dim"] != s["head_dim"] else "")
    options = [
        f"{s['batch']} sequences" if s["batch"] != 1 else "",
        f"{s['queries']:,} queries on {s['keys']:,} keys" if s["queries"] != s["keys"] else "",
        f"{s['padding']:,} padding" if s["padding"] else "",
        "" if s["causal"] else "not causal",
        f"window {tuple(s['window'])}" if s["window"] != [-1, -1] else "",
        f"softcap {s['softcap']:g}" if s["softcap"] else "",
        "sinks" if s["sinks"] else "",
        "rotated here" if s["rope"] else "",
    ]
    heads = f"{s['heads']} heads on {s['kv_heads']}"
    return ", ".join(filter(None, [f"{s['tokens']:,} tokens", heads, d, s["dtype"], *options]))


def schedule_line(report: AttentionComparisonReport) -> str:
    """How it was cut and computed, in one line."""
    s, how = report.shapes, [row.provenance for row in report.drifts]
    schedule = next((p.schedule_id for p in how if p.schedule_id), None)
    backend = next((p.actual_backend for p in how), "nothing")
    return ", ".join(
        [
            f"schedule {schedule}" if schedule else "no promised schedule",
            f"chunks of {s['query_chunk_size']}",
            f"pages of {s['kv_page_size']}",
            f"computed by {backend} on {s['device']}",
        ]
    )


def equal_bits(row: AttentionPathDrift) -> str:
    """Whether every element of ``out``, and of ``lse`` where there is one, is the reference's."""
    if not row.out.active_count:
        return "–"
    return "yes" if row.out.bit_equal and (row.lse is None or row.lse.bit_equal) else "no"


def keeps(row: AttentionPathDrift) -> str:
    """What a row has to keep and whether it does; ``informs`` where it has to keep nothing."""
    if row.check is None:
        return "informs"
    return f"{'✓' if row.check.passed else '✗'} {kept(row)}"


def differing(row: AttentionPathDrift) -> str:
    """Share of the output's elements that differ."""
    return percent(row.out.differing_count / row.out.active_count if row.out.active_count else None)


def milliseconds(row: AttentionPathDrift) -> str:
    """Time that the path took; none where the row is another view of a path that has its own."""
    return number(1000 * row.seconds if row.seconds else None)


def missing(reports: Sequence[AttentionComparisonReport]) -> list[tuple[str, str]]:
    """Paths that did not run and why, each once."""
    return list(dict.fromkeys((u.name, u.reason) for report in reports for u in report.unavailable))


def print_comparisons(reports: Sequence[AttentionComparisonReport], console: Console) -> None:
    """Verdict, a table a layer, and what did not run.

    Args:
        reports: of one or several layers, at least one.
        console: where.

    Raises:
        ValueError: there is none.
    """
    from rich.text import Text

    verdict, why = verdict_of(reports), reasons(reports)
    lines = Text.assemble((QUESTION, "dim"), "\n", (headline(reports), "bold"))
    for reason in why[:_MOST_REASONS]:
        lines.append(f"\n• {visible(reason)}")
    if len(why) > _MOST_REASONS:
        lines.append(f"\n• and {len(why) - _MOST_REASONS} more")
    for finding in findings(reports):
        lines.append(f"\n• {visible(finding)}", style="dim")
    console.print(panel(verdict, lines))
    console.print(Text(f"{SIGN}.", style="dim"))
    for report in reports:
        title = Text.assemble(
            (visible(report.label) or "inputs", "bold"), (f"  {report.verdict}", STYLES[report.verdict])
        )
        console.print(Text("\n").append_text(title))
        for line in (shape_line(report), schedule_line(report)):
            console.print(Text(visible(line), style="dim"))
        if report.drifts:
            console.print()
            console.print(_table(report, console.width))
    if absent := missing(reports):
        console.print(Text("\nDid not run", style="bold"))
    for name, reason in absent:
        console.print(Text.assemble(visible(name), (f": {visible(reason)}", "dim")))


def _table(report: AttentionComparisonReport, width: int) -> Table:
    """One table: a group of rows a reference."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    wide = width >= _WIDE
    gap = 1 if width >= _ROOMY else 0
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    lse = any(row.lse is not None for row in report.drifts)
    dlogp = any(row.dlogp is not None for row in report.drifts)
    table.add_column("path", overflow="fold")
    names = ["out\nmax", *(["\nmean", "\ndiffer"] if wide else []), *(["lse\nmax"] if lse else [])]
    names += [*(["dlogp\nmean", "\nmax"] if dlogp else []), "bit-\nequal", *(["\nms"] if wide else [])]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("\nhas to be", no_wrap=True)
    groups = Groups.of([report])
    for against, rows in (
        (
            f"vs {visible(report.reference_name)}" if groups.ways or groups.fp8 else "",
            groups.ways + groups.fp8,
        ),
        (f"vs {_UNFUSED}", groups.rotation),
        ("vs fp64 merge of the same", groups.merges),
        ("vs their own prefill", groups.peers),
    ):
        if not rows:
            continue
        table.add_section()
        table.add_row(Text(against), style="bold")
        for row in rows:
            cells = [largest(row.out), *([number(row.out.mean_abs), differing(row)] if wide else [])]
            cells += [largest(row.lse)] if lse else []
            cells += (
                [number(None if row.dlogp is None else row.dlogp.mean_abs), largest(row.dlogp)]
                if dlogp
                else []
            )
            cells += [equal_bits(row), *([milliseconds(row)] if wide else []), keeps(row)]
            lost = row.check is not None and not row.check.passed
            name = visible(row.name)
            if len(name) > _LONG and " " not in name:  # else it would be cut anywhere
                name = name.replace(":", "\n  :")
            table.add_row(Text(name), *cells, style="red" if lost else "" if row.check else "dim")
    return table

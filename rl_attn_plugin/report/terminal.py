"""The report as tables for a terminal of 100 columns."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from rl_attn_plugin.drift import ArmDrift, DriftReport
from rl_attn_plugin.report.words import PATH_WORDS, STEP_WORDS, VERDICT_WORDS, number, percent

_COLOURS = {"PASS": "green", "DRIFT": "red", "INCONCLUSIVE": "yellow", "INVALID": "magenta"}
_WORST = 5


def print_report(report: DriftReport, console: Console) -> None:
    """Print verdict, arms, steps and worst tokens."""
    colour = _COLOURS[report.verdict]
    reasons = "\n".join(escape(reason) for reason in report.reasons)
    body = f"[bold {colour}]{report.verdict}[/]  {VERDICT_WORDS[report.verdict]}\n{reasons}"
    console.print(Panel(body, border_style=colour, title=f"arm under test: {report.arm_under_test}"))
    if not report.arms:
        return
    console.print(_paths(report))
    console.print(_steps(report))
    if report.attention_share is not None:
        less = report.attention_share >= 0
        console.print(
            f"The plugin's attention changes mean |dlogp| by [bold]{percent(-report.attention_share)}[/] against "
            f"native attention on the same tokens ({'less' if less else 'more'} drift).\n"
        )
    if report.worst:
        console.print(_worst(report))


def _arms(report: DriftReport) -> list[tuple[str, ArmDrift]]:
    tested = report.arm_under_test
    return sorted(report.arms.items(), key=lambda item: item[0] != tested)


def _paths(report: DriftReport) -> Table:
    table = Table(
        title=f"trainer's full prefill against each rollout path ({report.sign})", title_justify="left"
    )
    for name in ("arm", "rollout path"):
        table.add_column(name)
    for name in ("tokens", "bit-equal", "mean", "mean abs", "p99 abs", "max abs", "KL k3"):
        table.add_column(name, justify="right")
    for arm, drift in _arms(report):
        for i, (path, found) in enumerate(drift.paths.items()):
            d = found.dlogp
            table.add_row(
                escape(arm) if i == 0 else "",
                PATH_WORDS.get(path, path),
                str(d.active_count),
                str(d.bit_equal),
                number(d.mean),
                number(d.mean_abs),
                number(d.p99_abs),
                number(d.max_abs),
                number(found.policy.kl_k3),
            )
        table.add_section()
    return table


def _steps(report: DriftReport) -> Table:
    table = Table(title="where it comes from: trainer - recorded, step by step", title_justify="left")
    table.add_column("arm")
    table.add_column("step")
    for name in ("mean", "mean abs", "max abs", "bit-equal", "share"):
        table.add_column(name, justify="right")
    for arm, drift in _arms(report):
        for i, (step, stats) in enumerate(drift.steps.items()):
            table.add_row(
                escape(arm) if i == 0 else "",
                STEP_WORDS[step][0],
                number(stats.mean),
                number(stats.mean_abs),
                number(stats.max_abs),
                f"{stats.bit_equal}/{stats.active_count}",
                percent(drift.step_share[step]),
            )
        table.add_section()
    return table


def _worst(report: DriftReport) -> Table:
    table = Table(title="largest |dlogp|", title_justify="left")
    for name in ("sample", "position"):
        table.add_column(name, justify="right")
    table.add_column("token in context", max_width=48, no_wrap=True, overflow="ellipsis")
    for name in ("trainer", "rollout", "dlogp"):
        table.add_column(name, justify="right")
    for token in report.worst[:_WORST]:
        before = escape(repr(token.before[-20:])[1:-1])
        text, after = escape(repr(token.text)[1:-1]), escape(repr(token.after[:14])[1:-1])
        table.add_row(
            str(token.sample),
            str(token.position),
            f"[dim]{before}[/][reverse]{text}[/][dim]{after}[/]",
            number(token.logp_trainer),
            number(token.logp_rollout),
            number(token.dlogp),
        )
    return table

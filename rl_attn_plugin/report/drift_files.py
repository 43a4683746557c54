"""Drift of files: what was found, in words, and all of it in the terminal. Readable at 80 columns, safe for model text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_attn_plugin.monitor import Bin, DriftedToken
from rl_attn_plugin.offline import DriftFilesReport, RunDrift
from rl_attn_plugin.offline.result import Check
from rl_attn_plugin.report.console import marked, panel, titled_table
from rl_attn_plugin.report.words import SIGN, number, percent, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STEP_METRICS = ("dlogp/abs_mean", "dlogp/abs_p99", "kl/k3", "ess")
"""What the table of steps shows of each."""

_MOST_STEPS, _MOST_BINS, _MOST_WORST, _MOST_PROBLEMS = 12, 16, 6, 8  # in the terminal; the page has more
_BESIDE_CONTEXT = 60  # columns of the table of worst tokens that are not context
_BARS = "▁▂▃▄▅▆▇█"


def headline(run: RunDrift, min_tokens: int) -> str:
    """The verdict as a sentence."""
    count = int(run.metrics.get("tokens/compared", 0))
    tokens = f"{number(count)} tokens" + (f" of {number(len(run.steps))} steps" if len(run.steps) > 1 else "")
    if run.verdict == "PASS":
        return f"Trainer and rollout agree: on {tokens} every number is within its bound."
    if run.verdict == "DRIFT":
        failed = [check for check in run.checks if check.passed is False]
        since = first_firing(run)
        return (
            f"Trainer and rollout disagree: on {tokens} {len(failed)} of {len(run.checks)} numbers "
            f"{'is' if len(failed) == 1 else 'are'} beyond {'its' if len(failed) == 1 else 'their'} bound"
            + (f", from step {since}." if since is not None and len(run.steps) > 1 else ".")
        )
    if run.verdict == "INCONCLUSIVE" and count < min_tokens:
        return f"{tokens} can be compared; it takes {number(min_tokens)} to tell whether trainer and rollout agree."
    if run.verdict == "INCONCLUSIVE":
        return "A number that decides cannot be told from these files."
    return f"Some tokens hold no log-prob, so the run cannot be judged; {tokens} can be compared."


def first_firing(run: RunDrift) -> int | None:
    """The first step at which a rule fires; None where none does."""
    return next((step.step for step in run.steps if step.firing), None)


def untold(run: RunDrift) -> list[str]:
    """Reasons that the list of numbers and bounds does not tell already: not those of a number over all tokens."""
    if run.verdict == "PASS" or (
        run.verdict == "DRIFT" and any(check.within is False for check in run.checks)
    ):
        return []
    return run.reasons


def bound(check: Check) -> str:
    """A check's outcome, in words."""
    said = f"{'at least' if check.below else 'at most'} {check.bound:g}"
    if check.value is None:
        return f"{said}; cannot be told"
    if check.worst_step is None or check.worst_value is None or not check.fired:
        return said
    return f"{said}; {number(check.worst_value)} at step {check.worst_step}"


def in_context(token: DriftedToken) -> tuple[str, str, str]:
    """What is before a token, the token, what is after it: as text, else as token ids."""
    if token.text is not None:
        return token.text_before or "", token.text, token.text_after or ""
    before, after = (" ".join(map(str, ids)) for ids in (token.before, token.after))
    return f"{before} " if before else "", place_of(token.token_id), f" {after}" if after else ""


def place_of(value: int | None) -> str:
    """A number that may not be known."""
    return "–" if value is None else str(value)


def worth_showing(run: RunDrift) -> list[int]:
    """Indices of steps that tell most in little room: evenly spread, with the largest mean among them."""
    count = len(run.steps)
    if count <= _MOST_STEPS:
        return list(range(count))
    spread = {round(i * (count - 1) / (_MOST_STEPS - 1)) for i in range(_MOST_STEPS)}
    peak = max(range(count), key=lambda i: run.steps[i].metrics.get("dlogp/abs_mean", -math.inf))
    first = first_firing(run)
    return sorted(
        spread | {peak} | {i for i, step in enumerate(run.steps) if step.step == first and step.firing}
    )


def print_drift_files(report: DriftFilesReport, console: Console) -> None:
    """Verdict, diagnoses, each number against its bound, steps, groups, the worst tokens, and what could not be read.

    Args:
        report: what to print.
        console: where.
    """
    from rich.text import Text

    run, against = report.run, report.against
    lines = Text(headline(run, report.min_tokens), style="bold")
    for reason in [] if run.verdict == "PASS" else run.reasons:
        lines.append(f"\n• {visible(reason)}", style="not bold")
    for found in run.diagnoses:
        lines.append(f"\n{found.name} ({percent(found.confidence)}): ", style="bold")
        lines.append(visible(found.message), style="not bold")
    console.print(panel(run.verdict, lines, run.name))
    console.print(Text(f"{SIGN}.", style="dim"))
    console.print(_checks(run, against))
    if len(run.steps) > 1:
        console.print(_steps(run))
    for name, bins in run.tables.items():
        if name not in ("position", "probability"):
            console.print(_bins(name, bins, against.tables.get(name) if against else None))
    if run.worst:
        console.print(_worst("\nWorst tokens", run.worst[:_MOST_WORST], console.width))
    if run.invalid:
        console.print(_worst("\nTokens without a log-prob", run.invalid[:_MOST_WORST], console.width))
    for each in (run, against):
        if each is not None and each.problems:
            _print_problems(each, console)


def _checks(run: RunDrift, against: RunDrift | None) -> Table:
    table = titled_table("\nEach number and its bound")
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    if against:
        table.add_column(visible(against.name), justify="right", overflow="ellipsis", max_width=24)
    table.add_column("bound")
    for check in run.checks:
        style = {True: "", False: "red", None: "yellow"}[check.passed]
        cells = [number(against.metrics.get(check.metric))] if against else []
        table.add_row(check.metric, number(check.value), *cells, bound(check), style=style)
    return table


def _steps(run: RunDrift) -> Table:
    shown = worth_showing(run)
    sizes = [step.metrics.get("dlogp/abs_mean") for step in run.steps]
    table = titled_table(f"\nStep by step, mean |dlogp| {_spark(sizes)}")
    if len(shown) < len(run.steps):
        table.caption = f"{len(shown)} of {len(run.steps)} steps; the page has them all"
        table.caption_justify = "left"
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    for name in STEP_METRICS:
        table.add_column(name, justify="right", no_wrap=True)
    for i in shown:
        step = run.steps[i]
        table.add_row(
            str(step.step),
            step.verdict,
            number(int(step.metrics.get("tokens/compared", 0))),
            *(number(step.metrics.get(name)) for name in STEP_METRICS),
            style="red" if step.firing else "",
        )
    return table


def _spark(values: Sequence[float | None], width: int = 40) -> str:
    """The shape of a series in one line, each sign the largest of its stretch."""
    told = [value for value in values if value is not None and math.isfinite(value)]
    top = max(told, default=0.0)
    if top <= 0:
        return ""
    stretch = max(1, math.ceil(len(told) / width))
    peaks = [max(told[i : i + stretch]) for i in range(0, len(told), stretch)]
    return "".join(_BARS[min(int(peak / top * len(_BARS)), len(_BARS) - 1)] for peak in peaks)


def _bins(name: str, bins: Sequence[Bin], against: Sequence[Bin] | None) -> Table:
    table = titled_table(f"\nBy {visible(name)}")
    table.add_column(
        visible(name), overflow="ellipsis", max_width=24 if against is None else 15, no_wrap=True
    )
    for title in ("tokens", "mean", "mean |·|", "p99 |·|", "max |·|"):
        table.add_column(title, justify="right", no_wrap=True, min_width=7)
    other = {found.label: found.abs_mean for found in against or ()}
    if against is not None:
        table.add_column("other's", justify="right", no_wrap=True, min_width=7)
    ranked = sorted(bins, key=lambda found: -found.abs_mean)[:_MOST_BINS]
    for found in bins if len(bins) <= _MOST_BINS else ranked:
        table.add_row(
            visible(found.label),
            number(found.count),
            number(found.mean, signed=True),
            *(number(value) for value in (found.abs_mean, found.abs_p99, found.abs_max)),
            *([number(other.get(found.label))] if against is not None else []),
        )
    if len(bins) > _MOST_BINS:
        table.caption = f"the {_MOST_BINS} largest of {len(bins)}; the page has them all"
        table.caption_justify = "left"
    return table


def _worst(title: str, tokens: Sequence[DriftedToken], width: int) -> Table:
    table = titled_table(title)
    for name in ("dlogp", "p trainer", "p rollout", "step", "sample", "at"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("in context", no_wrap=True, overflow="ellipsis")
    room = min(max(width - _BESIDE_CONTEXT, 12), 56)
    for token in tokens:
        table.add_row(
            number(token.dlogp, signed=True),
            *(number(probability(logp)) for logp in (token.logp_trainer, token.logp_rollout)),
            str(token.step),
            place_of(token.sequence),
            place_of(token.position),
            marked(*in_context(token), room, room * 3 // 4),
        )
    return table


def probability(logp: float) -> float | None:
    """Of a log-prob; None where it is none."""
    return math.exp(logp) if logp <= 0 else None


def problems_found(run: RunDrift) -> str:
    """How many there are and what became of them, as a sentence."""
    count = len(run.problems) + run.more_problems
    left_out = sum(problem.damaged for problem in run.problems)
    if run.more_problems:
        return f"{number(count)} problems; of the first {number(len(run.problems))} {number(left_out)} were left out"
    return f"{number(count)} {'problem' if count == 1 else 'problems'}, {number(left_out)} left out"


def _print_problems(run: RunDrift, console: Console) -> None:
    from rich.text import Text

    console.print(Text(f"\n{visible(run.name)}: {problems_found(run)}", style="bold"))
    for problem in run.problems[:_MOST_PROBLEMS]:
        console.print(Text(f"  {visible(str(problem))}"), soft_wrap=True)
    if len(run.problems) > _MOST_PROBLEMS:
        console.print(Text(f"  and more; drift.json has the first {number(len(run.problems))}"))

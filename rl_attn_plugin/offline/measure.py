"""From files to a report: reads them in one pass, a monitor a step, and judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl_attn_plugin.drift.verdict import Verdict
from rl_attn_plugin.monitor import DEFAULT_RULES, Judgement, Rule, Watch
from rl_attn_plugin.monitor.worst import Tokenizer
from rl_attn_plugin.offline.columns import Wanted
from rl_attn_plugin.offline.errors import InputError
from rl_attn_plugin.offline.pieces import Piece
from rl_attn_plugin.offline.reading import Reading
from rl_attn_plugin.offline.result import Check, RunDrift, StepDrift
from rl_attn_plugin.offline.sources import find_files, is_table, step_of
from rl_attn_plugin.offline.steps import Steps

_LABELS = 64  # of a group; what comes after them is "other"
_SHOWN = 10  # problems that an error lists


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How files are read and judged.

    Attributes:
        wanted: columns.
        rules: bounds; actions are not run.
        min_tokens: fewer compared tokens are INCONCLUSIVE, of a step as of the run.
        over_threshold: abs(dlogp) above which tokens are counted, nats.
        worst: tokens that are kept.
        skip_damaged: judge the rest where rows or files cannot be read, instead of refusing.
        tokenizer: for the text of the worst tokens; files' own texts if None.
    """

    wanted: Wanted = field(default_factory=Wanted)
    rules: Sequence[Rule] = DEFAULT_RULES
    min_tokens: int = 1000
    over_threshold: float = 0.2
    worst: int = 32
    skip_damaged: bool = False
    tokenizer: Tokenizer | None = None


def measure(
    given: Sequence[Path],
    options: Options | None = None,
    *,
    progress: Callable[[int, int, int], None] | None = None,
) -> RunDrift:
    """Reads the files of one run and judges them.

    Args:
        given: files and folders.
        options: how.
        progress: called with bytes of files done, bytes of all, and tokens so far.

    Raises:
        InputError: nothing to read, unusable options, or damaged rows without ``skip_damaged``.
    """
    options = options or Options()
    files = find_files(given)
    names = {path: _name(path, given) for path in files}
    labels = _labels(files, names, options.wanted)
    reading = Reading(
        options.wanted, {name: {label: i for i, label in enumerate(found)} for name, found in labels.items()}
    )
    texts = _Texts()
    with Steps(over_threshold=options.over_threshold, worst=options.worst, groups=labels) as steps:
        done = tokens = 0
        sizes = {path: path.stat().st_size for path in files}
        size = sum(sizes.values())
        for path in files:
            for piece in _pieces(path, names[path], reading):
                texts.learn(piece.texts)
                tokens += _update(steps, piece)
                if progress is not None:
                    progress(done, size, tokens)
            done += sizes[path]
        stepless = all(step_of(path) is None for path in files) and not any(
            "step" in found.columns for found in reading.files
        )
        _refuse(reading, options)
        return _judged(", ".join(str(path) for path in given), steps, reading, options, texts, stepless)


def _pieces(path: Path, name: str, reading: Reading) -> Iterator[Piece]:
    if is_table(path):
        from rl_attn_plugin.offline.tables import read_table

        return read_table(path, name, step_of(path), reading)
    from rl_attn_plugin.offline.lines import read_lines

    return read_lines(path, name, step_of(path), reading)


def _update(steps: Steps, piece: Piece) -> int:
    for refused in piece.refused:
        trainer, rollout, mask = refused.lengths
        steps.monitor(refused.step).update(
            torch.zeros(trainer), torch.zeros(rollout), torch.ones(mask), step=refused.step
        )
    if not len(piece.mask):
        return 0
    numbers = np.unique(piece.step)
    for step in numbers.tolist():
        chosen = slice(None) if len(numbers) == 1 else np.flatnonzero(piece.step == step)
        steps.monitor(step).update(
            _tensor(piece.trainer[chosen]),
            _tensor(piece.rollout[chosen]),
            _tensor(piece.mask[chosen]),
            step=step,
            token_ids=None if piece.token_ids is None else _tensor(piece.token_ids[chosen]),
            sequence_ids=None if piece.sequence is None else _tensor(piece.sequence[chosen]),
            groups={name: _tensor(index[chosen]) for name, index in piece.groups.items()},
        )
    return len(piece.mask)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.require(array, requirements="W"))  # arrow's memory is read-only


def _refuse(reading: Reading, options: Options) -> None:
    if not reading.files:
        raise InputError("; ".join(str(problem) for problem in reading.problems[:_SHOWN]))
    if reading.damaged and not options.skip_damaged:
        damaged = [problem for problem in reading.problems if problem.damaged]
        more = reading.damaged - len(damaged[:_SHOWN])
        raise InputError(
            "some rows cannot be read (--skip-damaged judges the rest):\n"
            + "\n".join(f"  {problem}" for problem in damaged[:_SHOWN])
            + (f"\n  and {more} more" if more > 0 else "")
        )
    if reading.arms and not any(found.tokens for found in reading.files):
        there = ", ".join(f"{arm}/{path}" for arm, path in sorted(reading.arms))
        raise InputError(
            f"no row is of --arm {options.wanted.arm} and --path {options.wanted.path}; there are {there}"
        )


def _judged(
    name: str, steps: Steps, reading: Reading, options: Options, texts: _Texts, stepless: bool
) -> RunDrift:
    silent = [_silent(rule) for rule in options.rules]
    watch = Watch(silent, min_tokens=options.min_tokens)
    judged: list[Judgement] = []
    total = steps.nothing()
    for step, monitor in steps:  # once: most of them lie on disk
        judged.append(watch.judge(step, monitor))
        total = total.merge(monitor)
    tokenizer = options.tokenizer or (texts if texts else None)
    at_once = [_silent(rule, window=1) for rule in options.rules]
    whole = Watch(at_once, min_tokens=options.min_tokens).judge(0, total)
    fired = [alert for step in judged for alert in step.alerts]
    verdict, reasons = _verdict(whole, judged, stepless)
    edges, positive, negative = total.histogram()
    return RunDrift(
        name=name,
        verdict=verdict,
        reasons=reasons,
        metrics=whole.metrics,
        checks=[
            _check(rule, whole, judged)
            for rule in options.rules
            if rule.required or rule.metric in whole.metrics
        ],
        steps=[] if stepless else [StepDrift(j.step, j.verdict, j.metrics, j.firing) for j in judged],
        alerts=[] if stepless else [str(alert) for alert in fired],
        diagnoses=whole.diagnoses,
        tables={table: total.table(table) for table in ("position", "probability", *total.settings.groups)},
        edges=edges,
        positive=positive,
        negative=negative,
        worst=total.worst(tokenizer),
        invalid=total.invalid(tokenizer),
        files=reading.files,
        problems=reading.problems,
        more_problems=reading.more_problems,
    )


def _verdict(whole: Judgement, judged: Sequence[Judgement], stepless: bool) -> tuple[Verdict, list[str]]:
    """That of all tokens together, unless a step by itself is worse: a fault that begins late hardly shows in the whole."""
    if whole.verdict in ("INVALID", "DRIFT") or stepless:
        return whole.verdict, whole.reasons
    begun: dict[str, list[int]] = {}
    for step in judged:
        for alert in step.alerts:
            begun.setdefault(alert.rule.metric, []).append(step.step)
    if not begun:
        return whole.verdict, whole.reasons
    return "DRIFT", [
        f"{metric} is beyond its bound from step {at[0]}{f', and began to be {len(at)} times' if len(at) > 1 else ''}, "
        "though all steps together are within it"
        for metric, at in begun.items()
    ]


def _check(rule: Rule, whole: Judgement, judged: Sequence[Judgement]) -> Check:
    told = [(step.metrics[rule.metric], step.step) for step in judged if rule.metric in step.metrics]
    worst = (min if rule.below else max)(told, default=None, key=lambda pair: pair[0])
    return Check(
        metric=rule.metric,
        bound=rule.bound,
        below=rule.below,
        window=rule.window,
        value=whole.metrics.get(rule.metric),
        worst_step=worst[1] if worst else None,
        worst_value=worst[0] if worst else None,
        fired=sum(alert.rule.metric == rule.metric for step in judged for alert in step.alerts),
        origin=rule.origin,
    )


def _silent(rule: Rule, window: int | None = None) -> Rule:
    return Rule(
        metric=rule.metric,
        bound=rule.bound,
        below=rule.below,
        window=rule.window if window is None else window,
        clear=rule.clear,
        action=lambda alert: None,
        required=rule.required,
        origin=rule.origin,
    )


def _labels(files: Sequence[Path], names: dict[Path, str], wanted: Wanted) -> dict[str, list[str]]:
    """Labels of the groups, which a monitor must know beforehand: one more pass over these columns."""
    groups = list(wanted.groups)
    if not groups:
        return {}
    from rl_attn_plugin.offline.lines import labels_of_lines
    from rl_attn_plugin.offline.tables import labels_of_table

    found: dict[str, set[str]] = {group: set() for group in groups}
    aside = Reading(wanted)  # reading the log-probs says again what is wrong with a file
    for path in files:
        read = labels_of_table if is_table(path) else labels_of_lines
        for group, labels in read(path, names[path], groups, aside).items():
            found[group] |= labels
    for group, labels in found.items():
        if not labels:
            raise InputError(f"--groups {group}: no file has that column with a value in it")
    return {group: sorted(labels, key=_natural)[:_LABELS] for group, labels in found.items()}


def _natural(label: str) -> tuple[float, str]:
    try:
        value = float(label)
    except ValueError:
        return math.inf, label
    return (value, label) if math.isfinite(value) else (math.inf, label)


def _name(path: Path, given: Sequence[Path]) -> str:
    """A file's name as a person would say it: from the folder that was given."""
    for root in given:
        if root.is_dir() and path.is_relative_to(root):
            return str(path.relative_to(root))
    return str(path)


class _Texts:
    """The texts that files have beside token ids, for want of a tokenizer."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def learn(self, texts: dict[int, str]) -> None:
        for token, text in texts.items():
            self._known.setdefault(token, text)

    def __bool__(self) -> bool:
        return bool(self._known)

    def decode(self, ids: list[int], /) -> str:
        return "".join(self._known.get(token, f"<{token}>") for token in ids)

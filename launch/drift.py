"""``rl-attn drift``: the drift of a finished or running training, from the log-probs in files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rl_attn_plugin import __version__, provenance
from rl_attn_plugin.launch.config import DriftConfig
from rl_attn_plugin.launch.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_STATUS, StoreError, print_error
from rl_attn_plugin.launch.store import make_folder, write_atomic
from rl_attn_plugin.monitor import DEFAULT_RULES, DriftMonitor, Rule
from rl_attn_plugin.monitor.worst import Tokenizer
from rl_attn_plugin.offline import DriftFilesReport, InputError, Options, RunDrift, Wanted, measure

_RULE = re.compile(r"\s*([\w/]+)\s*(<=|>=)\s*(\S+)\s*")


def run(config: DriftConfig, files: Sequence[Path], *, console: Console | None = None) -> int:
    """Reads, judges, prints, and writes both files.

    Args:
        config: how.
        files: of the run, or folders of them.
        console: where to print; standard output if None. Errors go to standard error.

    Returns:
        0 PASS, 2 DRIFT, 3 INCONCLUSIVE, 1 INVALID data or bad input, 130 interrupted.
    """
    console = console or Console()
    try:
        return _run(config, files, console)
    except (InputError, ImportError, StoreError) as error:
        print_error(error)
        return EXIT_ERROR
    except KeyboardInterrupt:
        console.print("interrupted: nothing was written", highlight=False)
        return EXIT_INTERRUPTED


def _run(config: DriftConfig, files: Sequence[Path], console: Console) -> int:
    from rl_attn_plugin.report.drift_files import print_drift_files
    from rl_attn_plugin.report.drift_files_html import render_drift_files_html

    options = _options(config)
    report = DriftFilesReport(
        run=_measured(files, options, console),
        against=_measured(config.against, options, console) if config.against else None,
        min_tokens=config.min_tokens,
        over_threshold=config.over_threshold,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        version=__version__,
        provenance={"versions": provenance.versions()},
    )
    make_folder(config.out)
    text = json.dumps(report.to_dict(), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_atomic(config.out / "drift.json", text.encode("utf-8", "replace"))
    print_drift_files(report, console)
    page = render_drift_files_html(report)
    write_atomic(config.out / "report.html", page.encode("utf-8", "replace"))
    console.print(f"report: {config.out / 'report.html'}", soft_wrap=True, highlight=False, markup=False)
    return EXIT_STATUS[report.verdict]


def _measured(files: Sequence[Path], options: Options, console: Console) -> RunDrift:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)

        def advance(done: int, size: int, tokens: int) -> None:
            progress.update(task, completed=done, total=size, description=f"{tokens:,} tokens")

        return measure(files, options, progress=advance)


def _options(config: DriftConfig) -> Options:
    given = {
        "logp_trainer": config.trainer_column,
        "logp_rollout": config.rollout_column,
        "mask": config.mask_column,
    }
    names = {role: name for role, name in given.items() if name is not None}
    return Options(
        wanted=Wanted(names=names, groups=config.groups, arm=config.arm, path=config.path),
        rules=rules_of(config.rule),
        min_tokens=config.min_tokens,
        over_threshold=config.over_threshold,
        skip_damaged=config.skip_damaged,
        tokenizer=None if config.tokenizer is None else _tokenizer(config.tokenizer),
    )


def rules_of(given: Sequence[str]) -> tuple[Rule, ...]:
    """The default rules with those that are given in place of theirs.

    Args:
        given: ``metric<=bound`` or ``metric>=bound``.

    Raises:
        InputError: one is something else, or names no metric.
    """
    rules = {(rule.metric, rule.below): rule for rule in DEFAULT_RULES}
    known = _metrics() if given else []
    for text in given:
        found = _RULE.fullmatch(text)
        if found is None:
            raise InputError(f'--rule must be like "dlogp/abs_mean<=0.02" or "ess>=0.5", got {text!r}')
        metric, sign, number = found.groups()
        try:
            bound = float(number)
        except ValueError:
            raise InputError(f"--rule {text!r}: the bound must be a number, got {number!r}") from None
        if bound != bound:
            raise InputError(f"--rule {text!r}: the bound must be a number, got nan")
        if metric not in known:
            raise InputError(f"--rule {text!r}: there is no metric {metric!r}; there are {', '.join(known)}")
        rules[metric, sign == ">="] = Rule(metric=metric, bound=bound, below=sign == ">=", origin="given")
    return tuple(rules.values())


def _metrics() -> list[str]:
    """Every key that a monitor can have, of one that has seen a little of everything."""
    import torch

    monitor = DriftMonitor(groups={"turn": 2})
    monitor.update(
        torch.tensor([[-1.0, -2.0, -3.0]]),
        torch.tensor([[-1.5, -2.0, -2.5]]),
        torch.ones(1, 3),
        step=0,
        groups={"turn": torch.zeros(1)},
    )
    return list(monitor.compute())


def _tokenizer(name: str) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ImportError(
            f"--tokenizer needs {error.name}: pip install 'rl-attn-plugin[transformers]'"
        ) from error
    try:
        found: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--tokenizer must be a folder or hub id, got {name!r}: {str(error).splitlines()[0]}"
        ) from error
    tokenizer: Tokenizer = found
    return tokenizer

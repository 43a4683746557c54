"""What files of log-probs say, as data: the terminal, the page and ``drift.json`` are made from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rl_attn_plugin.drift.verdict import Verdict
from rl_attn_plugin.monitor import Bin, Diagnosis, DriftedToken
from rl_attn_plugin.monitor.plain import plain

SCHEMA = "rl-attn/drift-files/1"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a file that could not be taken in as it is.

    Attributes:
        file: its name, as given.
        place: ``line 7`` (counted from 1) of a text file, ``row 7`` (counted from 0) or ``rows 7 to 9`` of a table; empty
            where it is the whole file.
        what: was wrong, with the value got.
        damaged: whether the rows were not read; else they were, and are counted among the invalid tokens.
    """

    file: str
    place: str
    what: str
    damaged: bool = True

    def __str__(self) -> str:
        return f"{self.file}{f', {self.place}' if self.place else ''}: {self.what}"


@dataclass(frozen=True, slots=True)
class FileRead:
    """One file and what was read of it.

    Attributes:
        file: its name, as given.
        tokens: rows of tokens that it has, masked ones included.
        rows: lines or rows.
        one_row_is: ``token`` or ``sequence``.
        columns: of the file, by what they were taken for.
    """

    file: str
    tokens: int
    rows: int
    one_row_is: str
    columns: dict[str, str]


@dataclass(frozen=True, slots=True)
class StepDrift:
    """One step of training.

    Attributes:
        step: its number.
        verdict: of its tokens alone; rules remember the steps before.
        metrics: all of `DriftMonitor.compute`.
        firing: metrics of the rules that fire.
    """

    step: int
    verdict: Verdict
    metrics: dict[str, float]
    firing: list[str]


@dataclass(frozen=True, slots=True)
class Check:
    """One rule held against all tokens and against every step.

    Attributes:
        metric: key of `DriftMonitor.compute`.
        bound: the largest value that passes; the smallest where ``below``.
        below: whether falling below it is what fires.
        window: steps in a row that it takes.
        value: over all tokens; None where it cannot be told.
        worst_step: step with the value furthest beyond or nearest to the bound; None without steps.
        worst_value: its value.
        fired: steps at which the rule fired.
        origin: of the bound.
    """

    metric: str
    bound: float
    below: bool
    window: int
    value: float | None
    worst_step: int | None
    worst_value: float | None
    fired: int
    origin: str

    @property
    def within(self) -> bool | None:
        """Whether all tokens together are within the bound; None where it cannot be told."""
        if self.value is None:
            return None
        return self.value >= self.bound if self.below else self.value <= self.bound

    @property
    def passed(self) -> bool | None:
        """Whether they are and no step fired."""
        return None if self.within is None else self.within and not self.fired


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDrift:
    """One run: all its tokens, and step by step.

    Attributes:
        name: how it was given.
        verdict: INVALID: some tokens hold no log-prob. DRIFT: a rule fires on all tokens or at a step. INCONCLUSIVE: too few
            tokens. PASS: none of these.
        reasons: why, in words.
        metrics: over all tokens.
        checks: the rules.
        steps: in order; empty where neither rows nor file names say a step.
        alerts: rules that began to fire, in words, in the order of steps.
        diagnoses: faults that all tokens together show, most confident first.
        tables: ``position``, ``probability`` and the groups that were asked for.
        edges: of the bins of abs(dlogp); bin i lies between edges i - 1 and i, bin 0 holds exact zeros.
        positive: tokens with dlogp >= 0 in each bin.
        negative: tokens with dlogp < 0.
        worst: tokens with the largest abs(dlogp), largest first.
        invalid: a sample of those that hold no log-prob on one side.
        files: that were read.
        problems: rows that were not read, and rows that disagree with themselves; the first of them.
        more_problems: how many there are beyond those.
    """

    name: str
    verdict: Verdict
    reasons: list[str]
    metrics: dict[str, float]
    checks: list[Check]
    steps: list[StepDrift]
    alerts: list[str]
    diagnoses: list[Diagnosis]
    tables: dict[str, list[Bin]]
    edges: list[float]
    positive: list[int]
    negative: list[int]
    worst: list[DriftedToken]
    invalid: list[DriftedToken]
    files: list[FileRead]
    problems: list[Problem]
    more_problems: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftFilesReport:
    """What `measure` found.

    Attributes:
        run: what is judged.
        against: another run to hold it against; it informs.
        min_tokens: fewer compared tokens are INCONCLUSIVE.
        over_threshold: abs(dlogp) above which tokens are counted, nats.
        created: UTC, ISO 8601.
        version: of this package.
    """

    run: RunDrift
    against: RunDrift | None
    min_tokens: int
    over_threshold: float
    created: str
    version: str
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """That of the run."""
        return self.run.verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON: numbers that are not finite are the strings ``inf``, ``-inf`` and ``nan``."""
        found = asdict(self)
        for run in (found["run"], found["against"]):
            if run is not None:
                run["histogram"] = _without_empty(run.pop("edges"), run.pop("positive"), run.pop("negative"))
        report: dict[str, Any] = plain({"schema": SCHEMA, "verdict": self.verdict, **found})
        return report


def _without_empty(
    edges: Sequence[float], positive: Sequence[int], negative: Sequence[int]
) -> list[dict[str, float]]:
    return [
        {
            "low": edges[i - 1] if i else 0.0,
            "high": edges[i] if i < len(edges) else math.inf,
            "positive": up,
            "negative": down,
        }
        for i, (up, down) in enumerate(zip(positive, negative, strict=True))
        if up or down
    ]

"""What readers share: what is looked for, what was found, and what was wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_attn_plugin.monitor import MISSING
from rl_attn_plugin.offline.columns import Wanted
from rl_attn_plugin.offline.pieces import PIECE_TOKENS, UNKNOWN, Piece, Refused
from rl_attn_plugin.offline.result import FileRead, Problem

_KEPT = 1000  # problems that are kept; a file can have a million


@dataclass(slots=True)
class Reading:
    """One pass over the files of a run.

    Attributes:
        wanted: what to look for.
        labels: of each group, with their indices.
        files: that were read, so far.
        problems: so far, the first of them.
        more_problems: how many there are beyond those.
        damaged: how many of all of them are damage.
        arms: (arm, path) of rows that were left out.
    """

    wanted: Wanted
    labels: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    files: list[FileRead] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    more_problems: int = 0
    damaged: int = 0
    arms: set[tuple[str, str]] = field(default_factory=set)

    def wrong(self, file: str, place: str, what: str, *, damaged: bool = True) -> None:
        """Notes a problem."""
        self.damaged += damaged
        if len(self.problems) < _KEPT:
            self.problems.append(Problem(file, place, what, damaged))
        else:
            self.more_problems += 1


class Builder:
    """Collects tokens until there are enough for a piece, and never cuts a sequence."""

    def __init__(self) -> None:
        self._parts: list[dict[str, NDArray[Any]]] = []
        self._tokens = 0
        self.texts: dict[int, str] = {}
        self.refused: list[Refused] = []

    def add(self, **columns: NDArray[Any] | None) -> None:
        """Takes tokens in: ``trainer``, ``rollout``, ``mask``, ``step``, and ``sequence``, ``token_ids`` and
        ``group:<name>`` where they are known. The columns must be the same each time."""
        part = {name: column for name, column in columns.items() if column is not None}
        if len(part["mask"]):
            self._parts.append(part)
            self._tokens += len(part["mask"])

    def pieces(self, *, last: bool = False) -> Iterator[Piece]:
        """What is ready: everything but the sequence that may go on; everything if ``last``."""
        if not self._tokens or (self._tokens < PIECE_TOKENS and not last):
            if last and self.refused:
                yield self._piece({}, 0)
            return
        whole = {
            name: np.concatenate([part[name] for part in self._parts]) if len(self._parts) > 1 else column
            for name, column in self._parts[0].items()
        }
        cut = self._tokens
        if not last and "sequence" in whole:
            other = np.flatnonzero(whole["sequence"] != whole["sequence"][-1])
            cut = int(other[-1]) + 1 if len(other) else 0
        self._parts = [{name: column[cut:] for name, column in whole.items()}]
        self._tokens -= cut
        if cut:
            yield self._piece({name: column[:cut] for name, column in whole.items()}, cut)

    def _piece(self, columns: Mapping[str, NDArray[Any]], count: int) -> Piece:
        texts, self.texts = self.texts, {}
        refused, self.refused = self.refused, []
        return Piece(
            trainer=columns.get("trainer", np.empty(0)),
            rollout=columns.get("rollout", np.empty(0)),
            mask=columns.get("mask", np.empty(0, np.float32)),
            step=columns.get("step", np.empty(0, np.int64)),
            sequence=columns.get("sequence"),
            token_ids=columns.get("token_ids"),
            groups={
                name.removeprefix("group:"): column
                for name, column in columns.items()
                if name.startswith("group:")
            },
            texts=texts,
            refused=refused,
        )


class Runs:
    """Numbers stretches of equal values, so that names of any kind tell sequences apart."""

    def __init__(self) -> None:
        self._last: Any = None
        self._number = -1

    def __call__(self, value: Any) -> int:
        """The number of the stretch that a value belongs to."""
        if self._number < 0 or value != self._last:
            self._last = value
            self._number += 1
        return self._number


def floats(values: Sequence[Any], name: str) -> NDArray[np.float64]:
    """Numbers of JSON as fp64, null as `MISSING`.

    Raises:
        ValueError: something else is among them.
    """
    if None in values:
        values = [MISSING if value is None else value for value in values]
    try:
        found = np.asarray(values)
    except ValueError:  # lists of unlike lengths
        found = np.asarray(None)
    if found.ndim != 1 or (found.dtype.kind not in "fiub"):
        odd = next((value for value in values if not isinstance(value, int | float)), values)
        raise ValueError(f"{name} must hold numbers, got {str(odd)[:60]!r}")
    return found.astype(np.float64)


def integers(values: Sequence[Any], name: str) -> NDArray[np.int64]:
    """Token ids of JSON, null as unknown.

    Raises:
        ValueError: something else is among them.
    """
    if None in values:
        values = [UNKNOWN if value is None else value for value in values]
    found = floats(values, name)
    if not (np.isfinite(found).all() and (found == np.floor(found)).all() and (abs(found) < 2**53).all()):
        raise ValueError(f"{name} must hold integers, got {values[:3]}")
    return found.astype(np.int64)

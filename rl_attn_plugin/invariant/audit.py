"""What ran inside the mode, and what is known about it."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from rl_attn_plugin.invariant.kinds import Kind

# Frames of these modules do not say where a user's code called an operator.
_MACHINERY = ("torch.", "torch", "rl_attn_plugin.invariant", "contextlib")


class NotInvariant(RuntimeError):
    """A ``strict`` mode met an operator of which nobody knows that its rows are independent."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One operator.

    Attributes:
        operator: its name.
        kind: what is known.
        calls: how often it ran.
        where: ``file:line`` of the first call, for operators that are not known.
        reason: why it is not known, where there is more to say than its name.
    """

    operator: str
    kind: str
    calls: int
    where: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Every operator that ran.

    Attributes:
        entries: by kind, most frequent first.
    """

    entries: list[Entry] = field(default_factory=list)

    @property
    def unknown(self) -> list[Entry]:
        """Operators of which nothing is known: whatever went through them may depend on the batch."""
        return [entry for entry in self.entries if entry.kind == Kind.UNKNOWN.value]

    def __add__(self, other: AuditReport) -> AuditReport:
        """Both together; of an operator's places, the first."""
        merged: dict[tuple[str, str], Entry] = {}
        for entry in (*self.entries, *other.entries):
            before = merged.get((entry.operator, entry.kind))
            merged[entry.operator, entry.kind] = (
                entry if before is None else replace(before, calls=before.calls + entry.calls)
            )
        return AuditReport(_ordered(list(merged.values())))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            kind.value: [
                {
                    name: value
                    for name in ("operator", "calls", "where", "reason")
                    if (value := getattr(e, name)) is not None
                }
                for e in self.entries
                if e.kind == kind.value
            ]
            for kind in Kind
        }

    def __str__(self) -> str:
        lines = []
        for kind in Kind:
            mine = [e for e in self.entries if e.kind == kind.value]
            if not mine:
                continue
            lines.append(f"{kind.value}: {', '.join(f'{e.operator} ({e.calls})' for e in mine)}")
            lines += [f"  {e.operator} at {e.where}: {e.reason}" for e in mine if e.where is not None]
        return "\n".join(lines) or "nothing ran"


class Audit:
    """Counts operators as they run."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, Kind]] = Counter()
        self._first: dict[str, tuple[str, str | None]] = {}

    def note(self, operator: str, kind: Kind, reason: str | None = None) -> None:
        """One call."""
        self._calls[operator, kind] += 1
        if kind is Kind.UNKNOWN and operator not in self._first:
            self._first[operator] = (caller(), reason)

    def report(self) -> AuditReport:
        """What ran so far."""
        entries = [
            Entry(name, kind.value, calls, *(self._first[name] if kind is Kind.UNKNOWN else ()))
            for (name, kind), calls in self._calls.items()
        ]
        return AuditReport(_ordered(entries))


def _ordered(entries: list[Entry]) -> list[Entry]:
    kinds = list(Kind)
    return sorted(entries, key=lambda e: (kinds.index(Kind(e.kind)), -e.calls, e.operator))


def caller() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_MACHINERY):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"

"""A monitor for each step, most of them on disk: memory does not grow with the length of a run."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from rl_attn_plugin.monitor import DriftMonitor

_OPEN = 32  # monitors in memory: files of some ranks, each with a step of its own, at once


class Steps:
    """Monitors by step. Files may name their steps in any order.

    Args:
        settings: of every monitor, as for `DriftMonitor`.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._open: OrderedDict[int, DriftMonitor] = OrderedDict()
        self._known: set[int] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="rl-attn-drift-")

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def monitor(self, step: int) -> DriftMonitor:
        """The monitor of a step, until the next call."""
        found = self._open.pop(step, None)
        if found is None:
            found = self._load(step) if step in self._known else self.nothing()
            self._known.add(step)
        self._open[step] = found
        if len(self._open) > _OPEN:
            old, monitor = self._open.popitem(last=False)
            torch.save(monitor.state_dict(), self._file(old))
        return found

    def __iter__(self) -> Iterator[tuple[int, DriftMonitor]]:
        """Every step in order, with its monitor."""
        for step in sorted(self._known):
            found = self._open.get(step)
            yield step, self._load(step) if found is None else found

    def nothing(self) -> DriftMonitor:
        """A monitor with the same settings that has seen nothing."""
        return DriftMonitor(**self._settings)

    def _file(self, step: int) -> Path:
        return Path(self._folder.name) / f"{step}.pt"

    def _load(self, step: int) -> DriftMonitor:
        return DriftMonitor.from_state_dict(torch.load(self._file(step), weights_only=True))

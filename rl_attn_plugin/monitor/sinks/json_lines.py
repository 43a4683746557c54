"""A file with one line of JSON per step."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rl_attn_plugin.monitor.monitor import DriftMonitor
from rl_attn_plugin.monitor.sinks.common import Closing, naming, record
from rl_attn_plugin.monitor.watch import Judgement
from rl_attn_plugin.monitor.worst import Tokenizer

_BLOCK = 1 << 16


class JsonLinesSink(Closing):
    """Appends one line per step: step, verdict, reasons, metrics, firing, alerts, diagnoses and worst tokens.

    Strict JSON: NaN and infinities are the strings ``"nan"``, ``"inf"`` and ``"-inf"``. A line is flushed when written; half
    a line that a killed process left is cut off when the file is opened again.
    """

    def __init__(self, path: str | Path) -> None:
        """
        Args:
            path: of the file; folders are made.

        Raises:
            OSError: it cannot be written.
            ValueError: its last line is not ended and not one of ours.
        """
        self.path = Path(path)
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
        try:
            _cut_half_line(self.path)
        except BaseException:
            self._file.close()
            raise

    def write(
        self, judgement: Judgement, monitor: DriftMonitor, *, tokenizer: Tokenizer | None = None
    ) -> None:
        """Appends a step.

        Raises:
            ValueError: the sink is closed.
        """
        if self._file.closed:
            raise ValueError(
                f"the sink of {self.path} must be open to write step {judgement.step}, it is closed"
            )
        line = json.dumps(record(judgement, monitor.worst(tokenizer)), allow_nan=False, ensure_ascii=False)
        # one decodes ids one by one, and half a character is no text
        self._file.write(line.encode("utf-8", "replace") + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _cut_half_line(path: Path) -> None:
    """Truncates a file after its last newline."""
    with path.open("r+b") as file:
        at = file.seek(0, os.SEEK_END)
        tail = b""
        while at and b"\n" not in tail:
            start = max(0, at - _BLOCK)
            file.seek(start)
            tail = file.read(at - start) + tail
            at = start
        half = tail[tail.rfind(b"\n") + 1 :]
        if not half:
            return
        if not half.startswith(b"{"):  # not ours: somebody's file, given by mistake
            raise ValueError(
                f"{path} must be a file of JSON lines, its last line begins with {half[:20]!r}: name another"
            )
        file.seek(-len(half), os.SEEK_END)
        file.truncate()

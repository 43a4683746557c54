"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from rl_attn_plugin.drift import DriftReport


def write_json(report: DriftReport, path: Path) -> None:
    """Writes ``drift.json``; `DriftReport.from_dict` reads it back.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    text = json.dumps(report.to_dict(), indent=1, allow_nan=False, ensure_ascii=False)
    write_atomic(path, text + "\n")


def write_atomic(path: Path, text: str) -> None:
    """Writes all of ``text`` under ``path``, or leaves what was there.

    Raises:
        OSError: the disk is full or the place cannot be written. No temporary file is left.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # half a surrogate pair has no bytes in UTF-8, and no reader would understand it
        with temporary.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise

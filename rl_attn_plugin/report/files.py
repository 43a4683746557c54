"""Files that are whole or absent: written beside their place, then renamed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from rl_attn_plugin.drift import DriftReport


def write_text(path: Path, text: str) -> None:
    """Write a file atomically; on any error nothing is left under its name that was not there before.

    Raises:
        OSError: as the file system says it.
    """
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).chmod(0o644)  # mkstemp makes it private
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def write_json(report: DriftReport, path: Path) -> None:
    """Write ``drift.json``.

    Raises:
        OSError: see `write_text`.
    """
    write_text(path, json.dumps(report.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

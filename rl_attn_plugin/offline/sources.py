"""From what is given on the command line to files, and the steps that their names say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rl_attn_plugin.offline.errors import InputError

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
_STEP = re.compile(r"step[_\-=]?(\d+)")
_NUMBER = re.compile(r"(\d+)")


def find_files(given: Sequence[Path]) -> list[Path]:
    """All files of log-probs, folders opened, in the order of the numbers in their names.

    A folder that a parity job made gives its token tables; any other everything that it holds.

    Raises:
        InputError: something is not there, holds no such file, or is a file of another kind.
    """
    found: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = _inside(path)
            if not inside:
                raise InputError(f"{path} must hold files {_kinds()}, got none")
            found += inside
        elif not path.exists():
            raise InputError(f"{path} is not there: give files {_kinds()}, or folders of them")
        elif _suffix(path) is None:
            raise InputError(f"{path} must be a file {_kinds()}, got {path.suffix or 'no suffix'!r}")
        else:
            found.append(path)
    if not found:
        raise InputError(f"give files {_kinds()}, or folders of them")
    return list(dict.fromkeys(found))


def step_of(path: Path) -> int | None:
    """The step that a file's name or folder says, None if none: 12 of ``step_12/rank_0.jsonl``, ``train_data_step12.jsonl``
    and ``12.jsonl``."""
    stem = path.name.partition(".")[0]
    said = [stem] if stem.isdecimal() else _STEP.findall(stem) or _STEP.findall(path.parent.name)
    # a number that no integer of 64 bits holds is a name, not a step
    return int(said[-1]) if said and int(said[-1]) < 2**63 else None


def is_table(path: Path) -> bool:
    """Whether a file is Parquet."""
    return _suffix(path) == ".parquet"


def _inside(folder: Path) -> list[Path]:
    tokens = folder / "tokens"
    if (folder / "manifest.json").is_file() and tokens.is_dir():
        return sorted(tokens.glob("part-*.parquet"))
    hidden = (".", "_")
    return sorted(
        (
            path
            for path in folder.rglob("*")
            if path.is_file() and _suffix(path) and not path.relative_to(folder).name.startswith(hidden)
        ),
        key=lambda path: [
            (int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(str(path))
        ],
    )


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)


def _kinds() -> str:
    return "*" + ", *".join(SUFFIXES)

"""JSONL files: a token or a sequence a line, line by line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from rl_attn_plugin.monitor import MISSING
from rl_attn_plugin.offline.columns import Columns, Rows, find_columns
from rl_attn_plugin.offline.errors import InputError
from rl_attn_plugin.offline.pieces import UNKNOWN, Piece, Refused
from rl_attn_plugin.offline.reading import Builder, Reading, Runs, floats, integers
from rl_attn_plugin.offline.result import FileRead

_LINES = 1024  # rows of one token each that are taken in at once


def read_lines(path: Path, name: str, step: int | None, reading: Reading) -> Iterator[Piece]:
    """The pieces of a file.

    Args:
        path: of the file.
        name: by which it is reported.
        step: that its name says, for rows that say none.
        reading: takes problems and what was read.
    """
    builder, runs = Builder(), Runs()
    columns: Columns | None = None
    kind: Rows = "sequence"
    rows = tokens = sequences = 0
    waiting: list[dict[str, Any]] = []
    try:
        for number, row in _rows(path, name, reading):
            rows += 1
            try:
                if columns is None:
                    columns = find_columns(list(row), reading.wanted)
                    first = row.get(columns.by_role["logp_trainer"])
                    other = row.get(columns.by_role["logp_rollout"])
                    kind = "sequence" if isinstance(first, list) or isinstance(other, list) else "token"
                if kind == "sequence":
                    tokens += _add_sequence(builder, row, columns, step, sequences, reading)
                    sequences += 1
                elif (kept := _token(row, columns, step, reading)) is not None:
                    tokens += 1
                    waiting.append(kept)
                    if len(waiting) == _LINES:
                        _add_tokens(builder, waiting, runs)
                        waiting = []
            except InputError as error:
                reading.wrong(name, "", str(error))
                return
            except ValueError as error:
                damaged = not isinstance(error, _Disagree)
                reading.wrong(name, f"line {number}", str(error), damaged=damaged)
            yield from builder.pieces()
        if waiting:
            _add_tokens(builder, waiting, runs)
        yield from builder.pieces(last=True)
    finally:
        if columns is not None:
            reading.files.append(FileRead(name, tokens, rows, kind, columns.by_role))
        elif not rows and not any(problem.file == name for problem in reading.problems):
            reading.wrong(name, "", "must hold a JSON object a line, got an empty file")


class _Disagree(ValueError):
    """Lists of one row that differ in length: read, and counted as invalid."""


def _rows(path: Path, name: str, reading: Reading) -> Iterator[tuple[int, dict[str, Any]]]:
    opened: Any = gzip.open if path.name.lower().endswith(".gz") else open
    number = 0
    try:
        file: IO[bytes]
        with opened(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    torn = " (the file ends within it)" if not line.endswith(b"\n") else ""
                    reading.wrong(name, f"line {number}", f"is not JSON{torn}: {error}")
                    continue
                if not isinstance(row, dict):
                    reading.wrong(
                        name,
                        f"line {number}",
                        f"must be a JSON object, got {line[:60].decode(errors='replace')!r}",
                    )
                    continue
                yield number, row
    except (OSError, EOFError, zlib.error) as error:
        reading.wrong(name, f"line {number + 1} and after", f"cannot be read: {error}")


def _add_sequence(
    builder: Builder,
    row: Mapping[str, Any],
    columns: Columns,
    step: int | None,
    sequence: int,
    reading: Reading,
) -> int:
    """Adds a row with lists; returns its tokens."""
    lists: dict[str, NDArray[Any] | None] = {}
    for role in ("logp_trainer", "logp_rollout", "mask"):
        lists[role] = _list(row, columns, role)
    known = {role: values for role, values in lists.items() if values is not None}
    if not known.keys() & {"logp_trainer", "logp_rollout"}:
        raise ValueError("must have log-probs of one side at least, got null for both")
    count = len(known.get("mask", next(iter(known.values()))))
    number = _step(row, columns, step)
    if any(len(values) != count for values in known.values()):
        got = {columns.by_role[role]: len(values) for role, values in known.items()}
        sides = [len(known.get(role, ())) for role in ("logp_trainer", "logp_rollout")]
        builder.refused.append(Refused(step=number, lengths=(sides[0], sides[1], count)))
        raise _Disagree(
            f"lists must have one length, got {', '.join(f'{key} {size}' for key, size in got.items())}"
        )
    ids = None
    if (column := columns.get("token_ids")) is not None:
        given = _unwrapped(row.get(column))
        # prompts before the answer's tokens are common; which are which is not known then
        usable = isinstance(given, list) and len(given) == count
        ids = integers(given, column) if usable else np.full(count, UNKNOWN, np.int64)
    groups = {f"group:{name}": _labels(row.get(name), name, count, reading) for name in columns.groups}
    missing = np.full(count, MISSING, np.float64)
    sides_of = {"trainer": lists["logp_trainer"], "rollout": lists["logp_rollout"]}
    mask = lists["mask"]
    builder.add(
        **{name: missing if values is None else values for name, values in sides_of.items()},
        mask=np.ones(count, np.float32) if mask is None else mask.astype(np.float32),
        step=np.full(count, number, np.int64),
        sequence=np.full(count, _sample(row, columns, sequence), np.int64),
        token_ids=ids,
        **groups,
    )
    return count


def _token(
    row: Mapping[str, Any], columns: Columns, step: int | None, reading: Reading
) -> dict[str, Any] | None:
    """One token's values, checked; None if it is of another arm."""
    arm, path = columns.get("arm"), columns.get("path")
    if arm is not None and path is not None:
        of = (str(row.get(arm)), str(row.get(path)))
        if of != (reading.wanted.arm, reading.wanted.path):
            reading.arms.add(of)
            return None
    found: dict[str, Any] = {"step": _step(row, columns, step)}
    for name, role in (("trainer", "logp_trainer"), ("rollout", "logp_rollout")):
        value = row.get(columns.by_role[role])
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"{columns.by_role[role]} must be a number, got {str(value)[:60]!r}")
        found[name] = MISSING if value is None else float(value)
    if (column := columns.get("mask")) is not None:
        found["mask"] = floats([row.get(column)], column)[0]
    else:
        found["mask"] = 1.0
    if (column := columns.get("token_ids")) is not None:
        found["token_ids"] = int(integers([row.get(column)], column)[0])
    if (column := columns.get("text")) is not None and isinstance(row.get(column), str):
        found["text"] = row[column]
    if (column := columns.get("sample")) is not None:
        found["sample"] = row.get(column)
    for name in columns.groups:
        found[f"group:{name}"] = int(_labels(row.get(name), name, 1, reading)[0])
    return found


def _add_tokens(builder: Builder, rows: list[dict[str, Any]], runs: Runs) -> None:
    for row in rows:
        if "text" in row and row.get("token_ids", UNKNOWN) != UNKNOWN:
            builder.texts.setdefault(row["token_ids"], row["text"])
    sequence = None
    if "sample" in rows[0]:
        samples = [row["sample"] for row in rows]
        whole = all(isinstance(sample, int) and abs(sample) < 2**62 for sample in samples)
        sequence = np.asarray(samples if whole else [runs(sample) for sample in samples], np.int64)
    names = [name for name in rows[0] if name not in ("sample", "text")]
    columns = {name: np.asarray([row[name] for row in rows]) for name in names}
    columns["mask"] = columns["mask"].astype(np.float32)
    builder.add(**columns, sequence=sequence)


def _list(row: Mapping[str, Any], columns: Columns, role: str) -> NDArray[np.float64] | None:
    column = columns.get(role)
    if column is None:
        return None
    value = _unwrapped(row.get(column))
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"{column} must be a list, got {str(value)[:60]!r}")
    return floats(value, column)


def _unwrapped(value: Any) -> Any:
    """NeMo-RL writes each sample as a batch of one."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        return value[0]
    return value


def _sample(row: Mapping[str, Any], columns: Columns, otherwise: int) -> int:
    column = columns.get("sample")
    value = row.get(column) if column is not None else None
    return value if isinstance(value, int) and abs(value) < 2**62 else otherwise


def _step(row: Mapping[str, Any], columns: Columns, otherwise: int | None) -> int:
    column = columns.get("step")
    value = _unwrapped(row.get(column)) if column is not None else None
    if value is None:
        return 0 if otherwise is None else otherwise
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{column} must be an integer, got {str(value)[:60]!r}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{column} must be an integer of 64 bits, got {str(value)[:60]}")
    return value


def _labels(value: Any, name: str, count: int, reading: Reading) -> NDArray[np.int64]:
    labels = reading.labels.get(name, {})
    if isinstance(value, list):
        if len(value) != count:
            raise ValueError(f"{name} must be one value or {count}, got {len(value)}")
        return np.asarray([labels.get(str(item), len(labels)) for item in value], np.int64)
    return np.full(count, labels.get(str(value), len(labels)), np.int64)


def labels_of_lines(path: Path, name: str, groups: list[str], reading: Reading) -> dict[str, set[str]]:
    """Every label of some columns of a file."""
    found: dict[str, set[str]] = {group: set() for group in groups}
    for _, row in _rows(path, name, reading):
        for group in groups:
            value = row.get(group)
            if value is not None:
                found[group].update(map(str, value) if isinstance(value, list) else [str(value)])
    return found

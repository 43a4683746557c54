"""Parquet files: a token or a sequence a row, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rl_attn_plugin.monitor import MISSING
from rl_attn_plugin.offline.columns import Columns, Rows, find_columns
from rl_attn_plugin.offline.errors import InputError
from rl_attn_plugin.offline.pieces import UNKNOWN, Piece, Refused
from rl_attn_plugin.offline.reading import Builder, Reading, Runs
from rl_attn_plugin.offline.result import FileRead

_TOKEN_ROWS, _SEQUENCE_ROWS = 1 << 16, 256
_BUFFER = 1 << 20  # a file is streamed: its row groups may be larger than memory


def read_table(path: Path, name: str, step: int | None, reading: Reading) -> Iterator[Piece]:
    """The pieces of a file; arguments as for `lines.read_lines`."""
    opened = _open(path, name, reading)
    if opened is None:
        return
    schema = opened.schema_arrow
    try:
        columns = find_columns(schema.names, reading.wanted)
        kind = _kind(schema, columns)
    except InputError as error:
        reading.wrong(name, "", str(error))
        return
    builder, runs = Builder(), Runs()
    rows = tokens = 0
    try:
        start = 0
        for group in range(opened.num_row_groups):
            end = start + opened.metadata.row_group(group).num_rows
            try:
                for batch in opened.iter_batches(
                    _TOKEN_ROWS if kind == "token" else _SEQUENCE_ROWS, [group], columns.all
                ):
                    adds = _add_tokens if kind == "token" else _add_sequences
                    tokens += adds(builder, batch, columns, step, (name, start), runs, reading)
                    start += batch.num_rows
                    rows += batch.num_rows
                    yield from builder.pieces()
            except (OSError, pa.ArrowException) as error:
                reading.wrong(name, f"rows {start} to {end - 1}", f"cannot be read: {_short(error)}")
            start = end
        yield from builder.pieces(last=True)
    finally:
        reading.files.append(FileRead(name, tokens, rows, kind, columns.by_role))


def labels_of_table(path: Path, name: str, groups: list[str], reading: Reading) -> dict[str, set[str]]:
    """Every label of some columns of a file."""
    found: dict[str, set[str]] = {group: set() for group in groups}
    opened = _open(path, name, reading)
    if opened is None:
        return found
    present = [group for group in groups if group in opened.schema_arrow.names]
    try:
        for batch in opened.iter_batches(_TOKEN_ROWS, columns=present) if present else ():
            for group in present:
                column = batch.column(group)
                values = pc.unique(column.flatten() if _is_list(column.type) else column)
                found[group].update(str(value) for value in values.to_pylist() if value is not None)
    except (OSError, pa.ArrowException):
        pass  # reading the log-probs will say where
    return found


def _open(path: Path, name: str, reading: Reading) -> Any:
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        reading.wrong(name, "", f"is not a whole Parquet file: {_short(error)}")
        return None


def _kind(schema: pa.Schema, columns: Columns) -> Rows:
    kinds = set()
    for role in ("logp_trainer", "logp_rollout", "mask"):
        column = columns.get(role)
        if column is None:
            continue
        type_ = schema.field(column).type
        lists = _is_list(type_)
        inner = type_.value_type if lists else type_
        if not (pa.types.is_floating(inner) or pa.types.is_integer(inner) or pa.types.is_boolean(inner)):
            raise InputError(f"{column} must hold numbers or lists of numbers, got {type_}")
        kinds.add(lists)
    if len(kinds) != 1:
        raise InputError(
            "log-probs and mask must all be numbers (a token a row) or all be lists (a sequence a row)"
        )
    return "sequence" if kinds.pop() else "token"


def _is_list(type_: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    )


def _add_tokens(
    builder: Builder,
    batch: pa.RecordBatch,
    columns: Columns,
    step: int | None,
    at: tuple[str, int],
    runs: Runs,
    reading: Reading,
) -> int:
    """Adds rows of a token each; returns how many."""
    arm, path = columns.get("arm"), columns.get("path")
    if arm is not None and path is not None:
        wanted = pc.and_(
            pc.equal(batch.column(arm).cast(pa.string()), reading.wanted.arm),
            pc.equal(batch.column(path).cast(pa.string()), reading.wanted.path),
        )
        for pair in zip(pc.unique(batch.column(arm)), pc.unique(batch.column(path)), strict=False):
            reading.arms.add((str(pair[0]), str(pair[1])))
        batch = batch.filter(wanted)
    ids = _ids(batch, columns)
    if ids is not None and (column := columns.get("text")) is not None:
        fresh, first = np.unique(ids, return_index=True)
        for token, row in zip(fresh.tolist(), first.tolist(), strict=True):
            if token != UNKNOWN and (text := batch.column(column)[row].as_py()) is not None:
                builder.texts.setdefault(token, str(text))
    sequence = None
    if (column := columns.get("sample")) is not None:
        sequence = _samples(batch.column(column), runs)
    count: int = batch.num_rows
    builder.add(
        trainer=_floats(batch.column(columns.by_role["logp_trainer"])),
        rollout=_floats(batch.column(columns.by_role["logp_rollout"])),
        mask=_mask(batch, columns),
        step=_steps(batch, columns, step, at),
        sequence=sequence,
        token_ids=ids,
        **{f"group:{name}": _labels(batch.column(name), name, reading) for name in columns.groups},
    )
    return count


def _add_sequences(
    builder: Builder,
    batch: pa.RecordBatch,
    columns: Columns,
    step: int | None,
    at: tuple[str, int],
    runs: Runs,
    reading: Reading,
) -> int:
    """Adds rows with lists; returns their tokens."""
    name, start = at
    steps = _steps(batch, columns, step, at)
    sides = {role: batch.column(columns.by_role[role]) for role in ("logp_trainer", "logp_rollout")}
    if (column := columns.get("mask")) is not None:
        sides["mask"] = batch.column(column)
    lengths = {
        role: pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False).astype(np.int64)
        for role, values in sides.items()
    }
    count = np.full(batch.num_rows, -1)
    for role in ("mask", "logp_trainer", "logp_rollout"):
        if role in lengths:
            count = np.where(count < 0, lengths[role], count)
    empty = (lengths["logp_trainer"] < 0) & (lengths["logp_rollout"] < 0)
    agree = ~empty
    for found in lengths.values():
        agree &= (found < 0) | (found == count)
    for row in np.flatnonzero(~agree).tolist():
        if empty[row]:
            reading.wrong(
                name, f"row {start + row}", "must have log-probs of one side at least, got null for both"
            )
            continue
        got = {role: int(found[row]) for role, found in lengths.items()}
        shown = (max(got["logp_trainer"], 0), max(got["logp_rollout"], 0), int(count[row]))
        builder.refused.append(Refused(step=int(steps[row]), lengths=shown))
        said = ", ".join(f"{columns.by_role[role]} {size}" for role, size in got.items() if size >= 0)
        reading.wrong(name, f"row {start + row}", f"lists must have one length, got {said}", damaged=False)
    keep = pa.array(agree)
    batch, count, steps = batch.filter(keep), count[agree], steps[agree]
    total = int(count.sum())

    def flat(role: str, otherwise: float) -> NDArray[np.float64]:
        values = batch.column(columns.by_role[role])
        known = np.repeat(pc.is_valid(values).to_numpy(zero_copy_only=False), count)
        found = np.full(total, otherwise, np.float64)
        found[known] = _floats(values.flatten(), otherwise)
        return found

    sample = columns.get("sample")
    names = (
        np.asarray([runs(start + row) for row in np.flatnonzero(agree).tolist()], np.int64)
        if sample is None
        else _samples(batch.column(sample), runs)
    )
    ids = None
    if (column := columns.get("token_ids")) is not None:
        ids = _listed_ids(batch.column(column), count)
    builder.add(
        trainer=flat("logp_trainer", MISSING),
        rollout=flat("logp_rollout", MISSING),
        mask=flat("mask", np.nan).astype(np.float32) if "mask" in sides else np.ones(total, np.float32),
        step=np.repeat(steps, count),
        sequence=np.repeat(names, count),
        token_ids=ids,
        **{
            f"group:{group}": _spread_labels(batch.column(group), group, count, at, reading)
            for group in columns.groups
        },
    )
    return total


def _floats(values: pa.Array, otherwise: float = MISSING) -> NDArray[np.float64]:
    found: NDArray[np.float64] = pc.fill_null(values.cast(pa.float64()), otherwise).to_numpy(
        zero_copy_only=False
    )
    return found


def _mask(batch: pa.RecordBatch, columns: Columns) -> NDArray[np.float32]:
    column = columns.get("mask")
    if column is None:
        return np.ones(batch.num_rows, np.float32)
    return _floats(batch.column(column), np.nan).astype(np.float32)  # null: neither 0 nor 1, and counted


def _steps(
    batch: pa.RecordBatch, columns: Columns, otherwise: int | None, at: tuple[str, int]
) -> NDArray[np.int64]:
    column = columns.get("step")
    number = 0 if otherwise is None else otherwise
    if column is None:
        return np.full(batch.num_rows, number, np.int64)
    values = batch.column(column)
    try:
        filled = pc.fill_null(values.cast(pa.int64()), number)
    except pa.ArrowException as error:
        raise pa.ArrowInvalid(f"{column} must hold integers, got {values.type}: {_short(error)}") from error
    found: NDArray[np.int64] = filled.to_numpy(zero_copy_only=False)
    return found


def _ids(batch: pa.RecordBatch, columns: Columns) -> NDArray[np.int64] | None:
    column = columns.get("token_ids")
    if column is None or not pa.types.is_integer(batch.column(column).type):
        return None
    found: NDArray[np.int64] = pc.fill_null(batch.column(column).cast(pa.int64()), UNKNOWN).to_numpy(
        zero_copy_only=False
    )
    return found


def _listed_ids(values: pa.Array, count: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Ids of sequences; unknown where a row has others than its log-probs, such as the prompt's."""
    if not _is_list(values.type) or not pa.types.is_integer(values.type.value_type):
        return None
    sizes = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
    fits = sizes == count
    found = np.full(int(count.sum()), UNKNOWN, np.int64)
    flat = pc.fill_null(values.filter(pa.array(fits)).flatten().cast(pa.int64()), UNKNOWN)
    found[np.repeat(fits, count)] = flat.to_numpy(zero_copy_only=False)
    return found


def _samples(values: pa.Array, runs: Runs) -> NDArray[np.int64]:
    if pa.types.is_integer(values.type) and not values.null_count:
        found: NDArray[np.int64] = values.cast(pa.int64()).to_numpy(zero_copy_only=False)
        return found
    codes = values.dictionary_encode() if not pa.types.is_dictionary(values.type) else values
    index = pc.fill_null(codes.indices, -1).to_numpy(zero_copy_only=False)
    names = codes.dictionary.to_pylist()
    starts = np.flatnonzero(np.diff(index, prepend=-2)) if len(index) else index
    numbers = [runs(names[i] if i >= 0 else None) for i in index[starts].tolist()]
    return np.repeat(np.asarray(numbers, np.int64), np.diff(starts, append=len(index)))


def _labels(values: pa.Array, name: str, reading: Reading) -> NDArray[np.int64]:
    labels = reading.labels.get(name, {})
    known = pa.array(list(labels), pa.string())
    places = pc.index_in(values.cast(pa.string()), value_set=known)
    found: NDArray[np.int64] = pc.fill_null(places.cast(pa.int64()), len(labels)).to_numpy(
        zero_copy_only=False
    )
    return found


def _spread_labels(
    values: pa.Array, name: str, count: NDArray[np.int64], at: tuple[str, int], reading: Reading
) -> NDArray[np.int64]:
    if not _is_list(values.type):
        return np.repeat(_labels(values, name, reading), count)
    sizes = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
    if not (sizes == count).all():
        raise pa.ArrowInvalid(f"{name} must have a value or a list as long as the log-probs in each row")
    return _labels(values.flatten(), name, reading)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]

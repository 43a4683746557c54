"""The run directory: what is in it, how it is written, and when a run may continue in it.

::

    manifest.json               configuration, provenance, model hashes, samples, timing; "state" says running or finished
    tokens/part-00000.parquet   one shard: a row per token, arm and path; its samples and timing in the file's metadata
    comparisons.json            layers of the model through the replay harness, where an oracle was asked for
    drift.json, report.html     the result
    logs/                       logs of the workers

A shard is committed by one rename of one file, so after a crash it is either there with all that belongs to
it or not there at all. Every file is written under a temporary name, synced, and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_attn_plugin.launch.errors import StoreError

TOKEN_SCHEMA = pa.schema(
    [
        ("sample", pa.int32()),
        ("position", pa.int32()),
        ("token_id", pa.int32()),
        ("text", pa.string()),
        ("arm", pa.string()),
        ("path", pa.string()),
        ("logp_trainer", pa.float32()),
        ("logp_rollout", pa.float32()),
        ("dlogp", pa.float64()),
    ]
)
COMPARISONS = "rl-attn/comparisons/1"
_META_KEY = b"rl_attn_plugin"
_PART = re.compile(r"part-(\d{5})\.parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One committed shard.

    Attributes:
        table: rows of `TOKEN_SCHEMA`.
        samples: the manifest entries of its samples, in order.
        timing: seconds per phase, ``"arm/phase"``.
    """

    table: pa.Table
    samples: list[dict[str, Any]]
    timing: dict[str, float]


def write_atomic(path: Path, data: bytes) -> None:
    """Writes all of ``data`` under ``path`` or leaves what was there.

    Raises:
        StoreError: the disk is full or the place cannot be written. No temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StoreError(write_failure(path, error)) from error


def make_folder(path: Path) -> None:
    """Makes a folder and those above it; one that is there already stays as it is.

    Raises:
        StoreError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(write_failure(path, error)) from error


def write_failure(path: Path, error: OSError) -> str:
    """A sentence about a failed write, with what helps."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{path} cannot be written: the disk is full. Free some space; the same command resumes"
    return f"{path} cannot be written: {error.strerror or error}"


class RunStore:
    """An opened and locked run directory.

    Args:
        root: the directory; made if missing.
        identity: what decides the run's numbers, JSON-able. An existing run with another identity is refused.
        shards: how many shards the run has.

    Raises:
        StoreError: not a run directory, another run's, in use by another process, or not writable.
    """

    def __init__(self, root: Path, *, identity: Mapping[str, Any], shards: int) -> None:
        self.root = root
        self.identity = dict(identity)
        self.shards = shards
        _refuse_strangers(root)
        self._lock = _lock(root)
        try:
            self.manifest = self._open()
        except BaseException:
            self.close()
            raise

    @property
    def finished(self) -> bool:
        """The manifest says so, and every shard is there and whole."""
        return self.manifest.get("state") == "finished" and len(self.committed()) == self.shards

    def _open(self) -> dict[str, Any]:
        if not (self.root / "manifest.json").exists():
            manifest: dict[str, Any] = {
                "state": "running",
                "identity": self.identity,
                "samples": [],
                "timing": {},
            }
        else:
            manifest = read_manifest(self.root)
            differing = _differences(manifest.get("identity", {}), self.identity)
            if differing:
                raise StoreError(
                    f"{self.root} holds another run; give another --out, or the same configuration to resume "
                    "it. Different are:\n" + "\n".join(f"  {line}" for line in differing)
                )
        for folder in (self.root / "tokens", self.root / "logs"):
            make_folder(folder)
        for folder in (self.root, self.root / "tokens"):  # the lock is ours: whoever wrote these is gone
            for leftover in folder.glob(".*.tmp"):
                leftover.unlink()
        return manifest

    def write_manifest(self, **fields: Any) -> None:
        """Adds ``fields`` and writes the manifest."""
        self.manifest.update(fields)
        text = json.dumps(self.manifest, indent=1, ensure_ascii=False)
        write_atomic(self.root / "manifest.json", text.encode("utf-8", "surrogatepass") + b"\n")

    def commit(self, index: int, shard: Shard) -> None:
        """Writes shard ``index``; when this returns it will never be done again."""
        meta = {"samples": shard.samples, "timing": shard.timing, "identity": self.identity}
        table = shard.table.cast(TOKEN_SCHEMA).replace_schema_metadata({_META_KEY: json.dumps(meta).encode()})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        write_atomic(self._part(index), sink.getvalue().to_pybytes())

    def committed(self) -> dict[int, Shard]:
        """The shards that are there. A part that is damaged or of another run counts as not there."""
        found: dict[int, Shard] = {}
        for index in range(self.shards):
            shard = _read_part(self._part(index), self.identity)
            if shard is not None:
                found[index] = shard
        return found

    def tokens(self) -> pa.Table:
        """The rows of all shards, in order.

        Raises:
            StoreError: a shard is missing or damaged.
        """
        done = self.committed()
        missing = [self._part(index).name for index in range(self.shards) if index not in done]
        if missing:
            raise StoreError(
                f"{self.root}/tokens must hold all {self.shards} shards, got no whole {', '.join(missing[:3])}: "
                "the same command measures them again"
            )
        return pa.concat_tables([done[index].table for index in sorted(done)])

    def write_comparisons(self, reports: list[dict[str, Any]], layers: Sequence[int]) -> None:
        """Writes ``comparisons.json``."""
        content = {"schema": COMPARISONS, "layers": list(layers), "reports": reports}
        text = json.dumps(content, indent=1, allow_nan=False)
        write_atomic(self.root / "comparisons.json", text.encode("utf-8") + b"\n")

    def comparisons(self, layers: Sequence[int]) -> list[dict[str, Any]] | None:
        """What `write_comparisons` wrote for these layers; None if it did not, or the file is damaged."""
        try:
            content = json.loads((self.root / "comparisons.json").read_text("utf-8"))
            same = content["schema"] == COMPARISONS and content["layers"] == list(layers)
            return list(content["reports"]) if same else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _part(self, index: int) -> Path:
        return self.root / "tokens" / f"part-{index:05d}.parquet"

    def close(self) -> None:
        """Gives the lock back."""
        os.close(self._lock)


def set_aside(root: Path) -> Path | None:
    """Renames a finished run to ``<root>.<when it was made>`` and returns the new name; leaves anything
    else alone."""
    if not (root / "manifest.json").is_file():
        return None
    manifest = read_manifest(root)
    if manifest.get("state") != "finished":
        return None
    stamp = re.sub(r"[^0-9T]", "", str(manifest.get("created", "")))[:15] or "old"
    target = root.with_name(f"{root.name}.{stamp}")
    number = 2
    while target.exists():
        target = root.with_name(f"{root.name}.{stamp}-{number}")
        number += 1
    try:
        root.rename(target)
    except OSError as error:
        raise StoreError(write_failure(target, error)) from error
    return target


_OBJECTS = ("identity", "config", "timing", "provenance", "model", "sampling", "audit")


def read_manifest(root: Path) -> dict[str, Any]:
    """``manifest.json`` of a run directory.

    Raises:
        StoreError: there is none, or it is not one of ours.
    """
    path = root / "manifest.json"
    try:
        manifest = json.loads(path.read_text("utf-8", "surrogatepass"))
    except FileNotFoundError:
        raise StoreError(f"{root} is not a run directory: it has no manifest.json") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or "identity" not in manifest:
        raise StoreError(f"{path} is not the manifest of a run: it has no identity")
    for name in _OBJECTS:
        value = manifest.get(name)
        if not isinstance(value, dict) and (value is not None or name == "identity"):
            raise StoreError(f"{path} has been changed: {name} must be an object, got {str(value)[:60]!r}")
    samples = manifest.get("samples")
    if not (
        samples is None or (isinstance(samples, list) and all(isinstance(each, dict) for each in samples))
    ):
        raise StoreError(
            f"{path} has been changed: samples must be a list of objects, got {str(samples)[:60]!r}"
        )
    return manifest


def read_tokens(root: Path) -> pa.Table:
    """All rows of a run directory, ordered by shard.

    Raises:
        StoreError: it has no token files or they cannot be read.
    """
    parts = sorted(path for path in (root / "tokens").glob("part-*.parquet") if _PART.fullmatch(path.name))
    if not parts:
        raise StoreError(f"{root} is not a run directory: it has no tokens/part-*.parquet")
    try:
        tables = [pq.read_table(path).replace_schema_metadata(None) for path in parts]
        return pa.concat_tables(tables).cast(TOKEN_SCHEMA)
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these two
        raise StoreError(f"{root}/tokens cannot be read: {error}") from error


def _read_part(path: Path, identity: Mapping[str, Any]) -> Shard | None:
    if not path.exists():
        return None
    try:
        table = pq.read_table(path)
        meta = json.loads((table.schema.metadata or {})[_META_KEY])
        if meta["identity"] != json.loads(json.dumps(dict(identity))):
            return None
        return Shard(
            table=table.replace_schema_metadata(None).cast(TOKEN_SCHEMA),
            samples=meta["samples"],
            timing=meta["timing"],
        )
    except (OSError, ValueError, KeyError):
        return None


def _refuse_strangers(root: Path) -> None:
    if not root.is_dir() or (root / "manifest.json").exists():
        return
    # A run killed before its first manifest has these two.
    strangers = sorted({entry.name for entry in root.iterdir()} - {".lock", "tokens", "logs"})
    if strangers:
        raise StoreError(
            f"{root} is not a run directory (it has no manifest.json, but {', '.join(strangers[:3])}): "
            "give --out an empty or new folder"
        )


def _lock(root: Path) -> int:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise StoreError(f"{root} must be a folder, got a file") from None
    except OSError as error:
        raise StoreError(f"the run directory {root} cannot be made: {error.strerror or error}") from error
    try:
        descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(f"the run directory {root} cannot be written: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise StoreError(f"{root} is in use by another job: wait for it, or give another --out") from None
    return descriptor


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    new = json.loads(json.dumps(dict(new)))
    return [
        f"{key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]

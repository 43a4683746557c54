"""The run directory: atomic, locked, resumed only by its own configuration, honest about full disks."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rl_attn_plugin.launch import store as store_module
from rl_attn_plugin.launch.errors import StoreError
from rl_attn_plugin.launch.store import RunStore, Shard, read_manifest, read_tokens, set_aside, write_atomic

IDENTITY = {"model": "m", "seed": 1}


def _shard(sample: int = 0) -> Shard:
    table = pa.table(
        {
            "sample": [sample], "position": [3], "token_id": [7], "text": ["<é"],
            "arm": ["plugin"], "path": ["recorded"],
            "logp_trainer": [-1.0], "logp_rollout": [-1.5], "dlogp": [0.5],
        }
    )  # fmt: skip
    return Shard(table=table, samples=[{"sample": sample}], timing={"plugin/recorded": 1.0})


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def _open(root: Path, **changes: Any) -> RunStore:
    return RunStore(root, identity={**IDENTITY, **changes}, shards=2)


def test_commit_and_read_back(tmp_path: Path) -> None:
    store = _open(tmp_path / "deep" / "run")
    store.write_manifest(state="running")
    store.commit(1, _shard(5))
    assert list(store.committed()) == [1]
    assert store.committed()[1].samples == [{"sample": 5}]
    store.commit(0, _shard(4))
    assert read_tokens(store.root)["sample"].to_pylist() == [4, 5]
    assert read_tokens(store.root).schema.equals(store_module.TOKEN_SCHEMA)
    store.close()


def test_same_configuration_resumes_and_another_is_refused(tmp_path: Path) -> None:
    store = _open(tmp_path)
    store.write_manifest()
    store.commit(0, _shard())
    store.close()
    again = _open(tmp_path)
    assert list(again.committed()) == [0]
    again.close()
    with pytest.raises(StoreError, match=r"(?s)holds another run.*seed: 1 there, 2 now"):
        _open(tmp_path, seed=2)
    again = _open(tmp_path)  # the refusal gave the lock back and changed nothing
    assert list(again.committed()) == [0]
    again.close()


def test_folder_of_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(
        StoreError, match=r"is not a run directory \(it has no manifest.json, but thesis.tex\)"
    ):
        _open(tmp_path)
    assert _files(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": "web app"}'])
def test_foreign_manifest_is_refused(tmp_path: Path, content: Any) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        _open(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"identity": None}, "identity must be an object, got 'None'"),
        ({"identity": ["x"]}, "identity must be an object"),
        ({"timing": 3}, "timing must be an object, got '3'"),
        ({"model": "x"}, "model must be an object, got 'x'"),
        ({"sampling": [1]}, "sampling must be an object"),
        ({"audit": 3}, "audit must be an object"),
        ({"config": "x"}, "config must be an object"),
        ({"provenance": 1}, "provenance must be an object"),
        ({"samples": 3}, "samples must be a list of objects, got '3'"),
        ({"samples": ["x"]}, "samples must be a list of objects"),
    ],
)
def test_a_manifest_that_was_edited_is_refused_by_name(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole: dict[str, Any] = {"identity": {"model": "m"}, "samples": [{"sample": 0}], "timing": None}
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(whole))
    assert read_manifest(tmp_path) == whole
    path.write_text(json.dumps(whole | changed))
    with pytest.raises(StoreError, match="has been changed") as caught:
        read_manifest(tmp_path)
    assert message in str(caught.value)


def test_reading_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is not a run directory: it has no manifest\.json"):
        read_manifest(tmp_path)
    with pytest.raises(StoreError, match="is not a run directory: it has no tokens"):
        read_tokens(tmp_path)


def test_file_in_the_way_and_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="must be a folder, got a file"):
        _open(tmp_path / "file")
    with pytest.raises(StoreError, match="cannot be made: Not a directory"):
        _open(tmp_path / "file" / "run")
    with pytest.raises(StoreError, match="/proc/run cannot be made"):
        _open(Path("/proc/run"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(StoreError, match="cannot be written: Permission denied"):
            _open(tmp_path)
    finally:
        tmp_path.chmod(0o755)


def test_one_job_at_a_time(tmp_path: Path) -> None:
    store = _open(tmp_path)
    code = (
        "import sys; from pathlib import Path; from rl_attn_plugin.launch.store import RunStore\n"
        f"RunStore(Path({str(tmp_path)!r}), identity={IDENTITY!r}, shards=2)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert result.returncode != 0
    assert "is in use by another job" in result.stderr
    store.close()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_leftovers_are_cleared_and_damaged_parts_done_again(tmp_path: Path) -> None:
    store = _open(tmp_path)
    store.write_manifest()
    store.commit(0, _shard())
    store.commit(1, _shard())
    store.close()
    (tmp_path / "tokens" / ".part-00001.parquet.99.tmp").write_bytes(b"half")
    part = tmp_path / "tokens" / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:100])
    store = _open(tmp_path)
    assert list(store.committed()) == [0]
    assert not list((tmp_path / "tokens").glob(".*"))
    store.close()


def test_a_run_is_finished_only_with_all_its_shards(tmp_path: Path) -> None:
    store = _open(tmp_path)
    store.write_manifest(state="finished")
    store.commit(0, _shard(4))
    assert not store.finished
    with pytest.raises(StoreError, match=r"must hold all 2 shards, got no whole part-00001\.parquet"):
        store.tokens()
    store.commit(1, _shard(5))
    assert store.finished
    (tmp_path / "tokens" / "part-00002.parquet").write_bytes(b"another run's")
    assert store.tokens()["sample"].to_pylist() == [4, 5]
    store.close()


def test_part_of_another_run_does_not_count(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        store = _open(tmp_path / name, seed=seed)
        store.write_manifest()
        store.commit(0, _shard())
        store.close()
    (tmp_path / "a/tokens/part-00000.parquet").replace(tmp_path / "b/tokens/part-00000.parquet")
    store = _open(tmp_path / "b", seed=2)
    assert store.committed() == {}
    store.close()


def test_full_disk_leaves_the_old_file_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes the first bytes and then is full, as a real one does."""
    path = tmp_path / "x.json"
    write_atomic(path, b"old")
    real = os.write
    written: list[int] = []

    def almost_full(descriptor: int, data: Any) -> int:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(real(descriptor, bytes(data)[:2]))
        return written[0]

    monkeypatch.setattr(os, "write", almost_full)
    with pytest.raises(StoreError, match=r"x\.json cannot be written: the disk is full. Free some space"):
        write_atomic(path, b"new content")
    assert path.read_bytes() == b"old"
    assert _files(tmp_path) == ["x.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_for_real(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        store = _open(disk)
        store.write_manifest()
        store.commit(0, _shard())
        big = _shard()
        big.samples.append({"text": os.urandom(100_000).hex()})
        with pytest.raises(StoreError, match=r"part-00001\.parquet cannot be written: the disk is full"):
            store.commit(1, big)
        assert _files(disk) == [".lock", "manifest.json", "tokens/part-00000.parquet"]
        assert list(store.committed()) == [0]
        store.close()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_set_aside_keeps_a_finished_run_and_leaves_others_alone(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert set_aside(root) is None
    store = _open(root)
    store.write_manifest(created="2026-12-01T05:00:00+00:00")
    store.close()
    assert set_aside(root) is None  # unfinished: it resumes
    for expected in ("run.20261201T050000", "run.20261201T050000-2"):
        store = _open(root)
        store.write_manifest(state="finished", created="2026-12-01T05:00:00+00:00")
        store.close()
        assert set_aside(root) == tmp_path / expected
        assert not root.exists()


def test_manifest_keeps_any_text(tmp_path: Path) -> None:
    store = _open(tmp_path)
    store.write_manifest(samples=[{"completion_text": "\ud800 <script> \u2028"}])
    store.close()
    assert read_manifest(tmp_path)["samples"][0]["completion_text"] == "\ud800 <script> \u2028"
    json.loads((tmp_path / "manifest.json").read_bytes().decode("utf-8", "surrogatepass"))

"""Offline runs, read back from the .wandb file that `wandb sync` would send."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from rl_attn_plugin.monitor.sinks import WandbSink
from tests.monitor.sinks.steps import Letters, judged

_FILE_HEADER, _BLOCK, _CHUNK_HEADER = 7, 1 << 15, 7


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield
    if wandb.run is not None:
        wandb.finish()
    wandb.teardown()


def records(folder: Path) -> list[Any]:
    """The records of a run's file: LevelDB's log, chunks in blocks of 32 KiB."""
    wandb.teardown()  # a finished run is written on by wandb's service for a moment
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data = path.read_bytes()
    found, parts, at = [], [], _FILE_HEADER
    while at + _CHUNK_HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _CHUNK_HEADER:  # the rest of a block that holds no header is empty
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + _CHUNK_HEADER])
        at += _CHUNK_HEADER
        parts.append(data[at : at + size])
        at += size
        if kind in (1, 4):  # whole, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            found.append(record)
            parts = []
    return found


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows that were logged."""
    rows = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                *outer, last = item.nested_key or [item.key]
                inner = row
                for key in outer:
                    inner = inner.setdefault(key, {})
                inner[last] = json.loads(item.value_json)
            rows.append(row)
    return rows


def test_a_run_of_its_own(tmp_path: Path) -> None:
    steps = [judged(7), judged(9, size=0.5)]
    with WandbSink() as sink:
        for judgement, monitor in steps:
            sink.write(judgement, monitor, tokenizer=Letters())
    assert wandb.run is None
    rows = history(tmp_path)
    assert [row["drift/step"] for row in rows] == [7, 9]
    for (judgement, _), row in zip(steps, rows, strict=True):
        assert row["drift/verdict"] == judgement.verdict
        assert {name: row[f"drift/{name}"] for name in judgement.metrics} == judgement.metrics
        assert (
            row["drift/abs_dlogp"]["_type"] == "histogram" and sum(row["drift/abs_dlogp"]["values"]) == 2000
        )
        assert len(row["drift/abs_dlogp"]["bins"]) == len(row["drift/abs_dlogp"]["values"]) + 1
    axes = {
        r.metric.name or r.metric.glob_name: r.metric.step_metric
        for r in records(tmp_path)
        if r.WhichOneof("record_type") == "metric"
    }
    assert axes["drift/*"] == "drift/step"
    tables = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/drift/worst_*.table.json"))
    assert len(tables) == 2
    table = json.loads(tables[0].read_text(encoding="utf-8"))
    assert table["columns"][0] == "dlogp" and table["columns"][-1] == "text"
    worst = steps[0][1].worst(Letters())
    assert [row[0] for row in table["data"]] == [w.dlogp for w in worst]
    assert table["data"][0][-1] == worst[0].text


def test_a_run_that_is_given_stays_open(tmp_path: Path) -> None:
    with wandb.init(project="p") as run:
        run.log({"loss": 1.0}, step=5)
        with WandbSink(run) as sink:
            sink.write(*judged(5))
            run.log({"loss": 0.5}, step=6)
            sink.write(*judged(6))
        run.log({"loss": 0.25}, step=7)
    rows = history(tmp_path)
    assert [row["drift/step"] for row in rows if "drift/step" in row] == [5, 6]
    assert [row["loss"] for row in rows if "loss" in row] == [1.0, 0.5, 0.25]  # none comes too late


def test_a_trainer_that_logs_a_step_twice(tmp_path: Path) -> None:
    with wandb.init(project="p") as run, WandbSink(run, commit=False) as sink:
        for step in (1, 2):
            run.log({"loss": step / 2}, step=step)
            sink.write(*judged(step))
            run.log({"seconds": 3.0 * step}, step=step)
    rows = history(tmp_path)
    assert [(r["loss"], r["drift/step"], r["seconds"]) for r in rows] == [(0.5, 1, 3.0), (1.0, 2, 6.0)]


def test_an_invalid_step(tmp_path: Path) -> None:
    with WandbSink() as sink:
        sink.write(*judged(1, tokens=50, invalid=50))
    (row,) = history(tmp_path)
    assert row["drift/verdict"] == "INVALID" and row["drift/invalid/trainer_nan"] == 50
    assert "drift/abs_dlogp" not in row and "drift/dlogp/mean" not in row and "drift/worst" not in row

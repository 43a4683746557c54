"""One whole file per step."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from rl_attn_plugin.monitor.sinks import ParquetSink
from tests.monitor.sinks.steps import judged


def test_long_form(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "drift"
    steps = {12: judged(12), 123456789: judged(3)}
    with ParquetSink(folder) as sink:
        sink.write(*steps[12])
        judgement, monitor = judged(123456789)
        judgement.metrics.update(odd=math.nan, big=math.inf)
        sink.write(judgement, monitor)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step-00000012.parquet", "step-123456789.parquet"]
    table = pq.read_table(folder / names[0])
    assert [(f.name, str(f.type)) for f in table.schema] == [
        ("step", "int64"), ("metric", "string"), ("value", "double"),
    ]  # fmt: skip
    assert set(table["step"].to_pylist()) == {12}
    found = dict(zip(table["metric"].to_pylist(), table["value"].to_pylist(), strict=True))
    assert found == steps[12][0].metrics
    both = ds.dataset(folder).to_table()
    assert set(both["step"].to_pylist()) == {12, 123456789}
    values = dict(zip(both["metric"].to_pylist(), both["value"].to_pylist(), strict=True))
    assert math.isnan(values["odd"]) and values["big"] == math.inf


def test_a_step_again_replaces_its_file(tmp_path: Path) -> None:
    with ParquetSink(tmp_path) as sink:
        sink.write(*judged(1, tokens=100))
        sink.write(*judged(1, tokens=200))
    (path,) = tmp_path.iterdir()
    table = pq.read_table(path)
    assert (
        dict(zip(table["metric"].to_pylist(), table["value"].to_pylist(), strict=True))["tokens/active"]
        == 200
    )


def test_what_a_killed_process_left_is_not_read(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.parquet.tmp").write_bytes(b"PAR1 half")
    with ParquetSink(tmp_path) as sink:
        sink.write(*judged(2))
        assert set(ds.dataset(tmp_path).to_table()["step"].to_pylist()) == {2}
        sink.write(*judged(1))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .*file .*: pass a path that this process may write to"):
        ParquetSink(tmp_path / "file")
    sink = ParquetSink(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(OSError, match=r"cannot write .*step-00000001.parquet \(.*: pass a path"):
        sink.write(*judged(1))

"""One line per step, strict JSON, whole lines only."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_attn_plugin.integrations.monitoring.hook import DriftHook, Sink
from rl_attn_plugin.monitor.sinks import JsonLinesSink
from tests.monitor.sinks.steps import Letters, judged


def strict(line: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [strict(line) for line in text[:-1].split("\n")]


def test_one_line_per_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "drift.jsonl"
    with JsonLinesSink(path) as sink:
        for step in (1, 2):
            judgement, monitor = judged(step, size=0.01 if step == 1 else 0.5)
            sink.write(judgement, monitor, tokenizer=Letters())
            assert len(lines(path)) == step  # flushed, not only when closed
            last = lines(path)[-1]
            assert last["step"] == step and last["verdict"] == judgement.verdict
            assert last["metrics"] == judgement.metrics  # floats survive exactly
            assert last["reasons"] == judgement.reasons and last["firing"] == judgement.firing
            worst = monitor.worst(Letters())
            assert [w["dlogp"] for w in last["worst"]] == [w.dlogp for w in worst]
            assert last["worst"][0]["text"] == worst[0].text and worst[0].text
    first, second = lines(path)
    assert first["verdict"] == "PASS" and first["alerts"] == []
    assert second["verdict"] == "DRIFT" and second["alerts"][0]["metric"] in second["firing"]
    assert "step 2" in second["alerts"][0]["message"]
    with pytest.raises(ValueError, match="must be open to write step 2, it is closed"):
        sink.write(judgement, monitor)
    sink.close()


def test_without_a_tokenizer_there_is_no_text(tmp_path: Path) -> None:
    with JsonLinesSink(tmp_path / "a") as sink:
        sink.write(*judged(1))
    (line,) = lines(tmp_path / "a")
    assert line["worst"][0]["text"] is None and line["worst"][0]["token_id"] is not None


def test_what_json_has_not_is_a_string(tmp_path: Path) -> None:
    judgement, monitor = judged(1)
    odd = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1}
    with JsonLinesSink(tmp_path / "a") as sink:
        sink.write(dataclasses.replace(judgement, metrics=odd), monitor)
    assert lines(tmp_path / "a")[0]["metrics"] == {"a": "nan", "b": "inf", "c": "-inf", "d": 0.1}


def test_an_invalid_step(tmp_path: Path) -> None:
    with JsonLinesSink(tmp_path / "a") as sink:
        sink.write(*judged(1, tokens=50, invalid=50))
    (line,) = lines(tmp_path / "a")
    assert line["verdict"] == "INVALID" and "dlogp/mean" not in line["metrics"]


def test_half_a_character_does_not_stop_a_run(tmp_path: Path) -> None:
    class Broken:
        def decode(self, ids: list[int]) -> str:
            return "\ud800é"

    with JsonLinesSink(tmp_path / "a") as sink:
        sink.write(*judged(1), tokenizer=Broken())
    assert lines(tmp_path / "a")[0]["worst"][0]["text"] == "?é"


@pytest.mark.parametrize("length", [1, 40, 70_000, 200_000])
def test_half_a_line_is_cut_off(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a"
    with JsonLinesSink(path) as sink:
        sink.write(*judged(1))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 2, "pad": "'.ljust(length, b"x")[:length])
    with JsonLinesSink(path) as sink:
        assert path.read_bytes() == whole
        sink.write(*judged(2))
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_only_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b'{"step": ')
    JsonLinesSink(path).close()
    assert path.read_bytes() == b""


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"weights, without a newline")
    with pytest.raises(ValueError, match="must be a file of JSON lines, its last line begins with b'weights"):
        JsonLinesSink(path)
    assert path.read_bytes() == b"weights, without a newline"


def test_a_killed_process(tmp_path: Path) -> None:
    """Whatever a process wrote before SIGKILL, the next one goes on with whole lines."""
    code = (
        "import sys\n"
        "from rl_attn_plugin.monitor.sinks import JsonLinesSink\n"
        "from tests.monitor.sinks.steps import judged\n"
        "sink, step = JsonLinesSink(sys.argv[1]), judged(1)\n"
        "while True:\n"
        "    sink.write(*step)\n"
        "    print('.', flush=True)\n"
    )
    path = tmp_path / "a"
    root = Path(__file__).resolve().parents[3]
    writer = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, cwd=root)
    assert writer.stdout is not None
    for _ in range(20):
        assert writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    with JsonLinesSink(path) as sink:
        sink.write(*judged(2))
    found = lines(path)
    assert len(found) > 20 and found[-1]["step"] == 2


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=r"cannot write .*file/x/a .*: pass a path that this process may write to"
    ):
        JsonLinesSink(tmp_path / "file" / "x" / "a")
    with pytest.raises(IsADirectoryError, match="cannot write"):
        JsonLinesSink(tmp_path)


def test_it_is_a_sink_of_the_hook(tmp_path: Path) -> None:
    sink: Sink = JsonLinesSink(tmp_path / "a")
    hook = DriftHook(sinks=[sink])
    _, hook.monitor = judged(1)
    hook.end_step(1)
    assert lines(tmp_path / "a")[0]["step"] == 1
    assert isinstance(sink, JsonLinesSink)
    sink.close()

"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_attn_plugin.monitor.sinks import TensorBoardSink
from tests.monitor.sinks.steps import Letters, judged


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    return events.Reload()


def text(events: EventAccumulator, tag: str) -> list[str]:
    return [
        event.tensor_proto.string_val[0].decode() for event in events.Tensors(f"drift/{tag}/text_summary")
    ]


def test_scalars_histogram_and_text(tmp_path: Path) -> None:
    steps = [judged(1), judged(2, size=0.5)]
    with TensorBoardSink(tmp_path / "new" / "run") as sink:
        for judgement, monitor in steps:
            sink.write(judgement, monitor, tokenizer=Letters())
        flushed = read(sink.folder)
        assert len(flushed.Scalars("drift/dlogp/abs_mean")) == 2  # a killed run has its steps
    events = read(tmp_path / "new" / "run")
    names = set(steps[0][0].metrics) | set(steps[1][0].metrics)
    assert {f"drift/{name}" for name in names} == set(events.Tags()["scalars"])
    for name in names:
        found = {event.step: event.value for event in events.Scalars(f"drift/{name}")}
        wanted = {j.step: np.float32(j.metrics[name]) for j, _ in steps if name in j.metrics}
        assert found == wanted
    for (judgement, _), event in zip(steps, events.Histograms("drift/abs_dlogp"), strict=True):
        h, m = event.histogram_value, judgement.metrics
        assert event.step == judgement.step and h.num == 2000 == sum(h.bucket)
        assert h.min == 0 and h.bucket[0] == m["tokens/bit_equal"] and h.bucket_limit[0] == 0
        assert h.max == m["dlogp/abs_max"] <= h.bucket_limit[-1]
        assert h.sum == pytest.approx(m["dlogp/abs_mean"] * 2000, rel=1e-12)
        assert h.sum_squares == pytest.approx(m["dlogp/rms"] ** 2 * 2000, rel=1e-12)
        assert list(h.bucket_limit) == sorted(h.bucket_limit)
        above = sum(n for limit, n in zip(h.bucket_limit, h.bucket, strict=True) if limit > 0.2 * 129 / 128)
        assert above <= m["tokens/over_threshold"]
    assert text(events, "verdict")[0].startswith("**PASS**\n\n- dlogp/abs_mean is")
    assert text(events, "verdict")[1].startswith("**DRIFT**\n\n- dlogp/abs_mean is")
    head, rule, *rows = text(events, "worst")[1].split("\n")
    assert head.startswith("| dlogp | logp_trainer") and rule.count("---") == 7 and len(rows) == 10
    worst = steps[1][1].worst(Letters())
    assert rows[0].startswith(f"| {worst[0].dlogp:.4g} | ")


def test_text_that_would_break_a_table(tmp_path: Path) -> None:
    class Awkward:
        def decode(self, ids: list[int]) -> str:
            return "a|b`c\nd"

    with TensorBoardSink(tmp_path) as sink:
        sink.write(*judged(1), tokenizer=Awkward())
    rows = text(read(tmp_path), "worst")[0].split("\n")
    assert len(rows) == 12 and {row.count("|") for row in rows} == {8}
    assert rows[-1].endswith(r"| `'a\x7cb\x60c\nd'` |")


def test_an_invalid_step_has_no_drift(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as sink:
        sink.write(*judged(1, tokens=50, invalid=50))
    events = read(tmp_path)
    assert events.Tags()["histograms"] == [] and "drift/dlogp/mean" not in events.Tags()["scalars"]
    assert events.Scalars("drift/invalid/trainer_nan")[0].value == 50
    assert text(events, "verdict")[0].startswith("**INVALID**")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .*file/run .*: pass a path"):
        TensorBoardSink(tmp_path / "file" / "run")

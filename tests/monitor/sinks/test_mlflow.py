"""Runs in MLflow's own store of files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest

from rl_attn_plugin.monitor.sinks import MlflowSink
from tests.monitor.sinks.steps import Letters, judged


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more than mlflow-skinny
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(tmp_path.as_uri() + "/store")
    yield
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(before)


def logged(run_id: str) -> Any:
    return mlflow.MlflowClient().get_run(run_id)


def artifact(run_id: str, name: str) -> dict[str, Any]:
    path = mlflow.MlflowClient().download_artifacts(run_id, name)
    found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return found


def test_a_run_of_its_own() -> None:
    steps = [judged(7), judged(9, size=0.5)]
    with MlflowSink() as sink:
        for judgement, monitor in steps:
            sink.write(judgement, monitor, tokenizer=Letters())
    run = logged(sink.run_id)
    assert run.info.status == "FINISHED" and mlflow.active_run() is None
    assert run.data.tags["drift.verdict"] == "DRIFT"
    names = {name for judgement, _ in steps for name in judgement.metrics}
    assert set(run.data.metrics) == {f"drift/{name}" for name in names}
    for name in names:
        found = {
            m.step: m.value for m in mlflow.MlflowClient().get_metric_history(sink.run_id, f"drift/{name}")
        }
        assert found == {j.step: j.metrics[name] for j, _ in steps if name in j.metrics}
    said = artifact(sink.run_id, "drift/step-00000009.json")
    assert said["verdict"] == "DRIFT" and said["reasons"] == steps[1][0].reasons and "metrics" not in said
    assert said["worst"][0]["text"] == steps[1][1].worst(Letters())[0].text


def test_the_active_run_stays_open() -> None:
    with mlflow.start_run() as run:
        with MlflowSink() as sink:
            sink.write(*judged(1))
        assert sink.run_id == run.info.run_id
        mlflow.log_metric("loss", 1.0)
    assert {"loss", "drift/ess"} <= set(logged(run.info.run_id).data.metrics)


def test_a_run_by_its_id() -> None:
    run_id = mlflow.MlflowClient().create_run("0").info.run_id
    judgement, monitor = judged(1)
    judgement.metrics["ratio/max"] = math.inf
    with MlflowSink(run_id) as sink:
        sink.write(judgement, monitor)
    run = logged(run_id)
    assert run.info.status == "RUNNING" and run.data.metrics["drift/ratio/max"] == math.inf
    with pytest.raises(mlflow.exceptions.MlflowException, match="not found"):
        MlflowSink("0" * 32)

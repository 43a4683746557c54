"""The job as a user meets it: real Ray, a real (tiny) model, and the exit status that scripts rely on."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pyarrow.parquet as pq
import pytest

from rl_attn_plugin import cli
from rl_attn_plugin.launch.errors import JobError
from rl_attn_plugin.launch.job import check_identities
from rl_attn_plugin.launch.policies.base import PolicyIdentity
from rl_attn_plugin.launch.store import read_manifest, read_tokens

pytestmark = pytest.mark.usefixtures("shared_ray")

TOKENS = 40
Job = Callable[..., tuple[int, Path]]


def _arguments(model: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    return [
        "parity", "--model", str(model), "--prompts", str(prompts), "--out", str(out), "--dtype", "float32",
        "--device", "cpu", "--max-new-tokens", str(TOKENS), "--shard-size", "2", "--chunk-size", "7",
        "--page-size", "4", *more,
    ]  # fmt: skip


@pytest.fixture
def job(tiny_model: Path, short_prompts: Path, tmp_path: Path) -> Job:
    """Runs the job in this process and returns (exit status, run directory)."""

    run = tmp_path / "run"

    def start(*more: str) -> tuple[int, Path]:
        return cli.main(_arguments(tiny_model, short_prompts, run, *more)), run

    return start


@pytest.fixture(scope="session")
def undisturbed(
    tiny_model: Path, short_prompts: Path, tmp_path_factory: pytest.TempPathFactory, shared_ray: None
) -> Path:
    """The token table of a run that nothing happened to."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert cli.main(_arguments(tiny_model, short_prompts, run)) == 0
    return run


def _assert_same_result(run: Path, undisturbed: Path) -> None:
    assert read_tokens(run).equals(read_tokens(undisturbed))
    ours, theirs = read_manifest(run), read_manifest(undisturbed)
    assert ours["samples"] == theirs["samples"]
    assert ours["state"] == "finished"
    # tokens are equal, so what is computed from them must be
    assert json.loads((run / "drift.json").read_text()) == json.loads(
        (undisturbed / "drift.json").read_text()
    )


def test_clean_run_passes_and_leaves_a_whole_run_directory(undisturbed: Path) -> None:
    manifest = read_manifest(undisturbed)
    assert {
        "config",
        "provenance",
        "model",
        "timing",
        "sampling",
        "chunk_size",
        "page_size",
        "created",
        "version",
    } <= set(manifest)
    assert manifest["model"]["dtype"] == "float32"
    assert len(manifest["model"]["weights_sha256"]) == 64
    assert (undisturbed / "report.html").stat().st_size > 1000
    samples = manifest["samples"]
    assert [sample["prompt_id"] for sample in samples] == ["one", "two", "three", "four", "five"]
    assert "<|im_start|>assistant" in samples[2]["prompt_text"]

    table = read_tokens(undisturbed).to_pylist()
    expected = sum(len(sample["completion_tokens"]) for sample in samples) * 3 * 3
    assert len(table) == expected > 5 * 3 * 3
    for row in table:
        sample = samples[row["sample"]]
        start = len(sample["prompt_tokens"])
        assert row["token_id"] == sample["completion_tokens"][row["position"] - start]
        assert row["dlogp"] == float(row["logp_trainer"]) - float(row["logp_rollout"])
        assert row["logp_trainer"] <= 0 and row["logp_rollout"] <= 0
    keys = {(row["sample"], row["position"], row["arm"], row["path"]) for row in table}
    assert len(keys) == expected
    assert {key[2:] for key in keys} == {
        (arm, path)
        for arm in ("native", "plugin", "zero-drift")
        for path in ("recorded", "chunked_prefill", "decode_replay")
    }
    assert all(row["logp_trainer"] == row["logp_rollout"] for row in table if row["arm"] == "zero-drift")
    assert any(row["dlogp"] for row in table if row["arm"] == "plugin")
    for side in ("trainer", "rollout"):
        audit = manifest["audit"][side]
        assert audit["not known"] == [] and {e["operator"] for e in audit["invariant by replacement"]} >= {
            "aten.mm"
        }
    for sample in samples:
        assert (sample["finish_reason"] == "length") == (len(sample["completion_tokens"]) == TOKENS)
        assert sample["finish_reason"] == "length" or sample["completion_tokens"][-1] == 2


def test_logps_are_those_of_the_model_at_the_sampling_temperature(tiny_model: Path, job: Job) -> None:
    """Against a plain forward of transformers, one sequence at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    status, run = job("--temperature", "0.7", "--top-p", "0.8")
    assert status == 0
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    rows = read_tokens(run).to_pylist()
    for sample in read_manifest(run)["samples"]:
        ids = torch.tensor([sample["prompt_tokens"] + sample["completion_tokens"]])
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).logits[0].double() / 0.7, -1)
        for row in rows:
            if row["sample"] == sample["sample"]:
                expected = logp[row["position"] - 1, row["token_id"]].item()
                assert row["logp_trainer"] == pytest.approx(expected, abs=2e-5)
                assert row["logp_rollout"] == pytest.approx(expected, abs=2e-5)


def test_drift_json_can_be_recomputed_from_the_tokens(undisturbed: Path) -> None:
    """By code that shares nothing with the product: numpy on the Parquet columns."""
    result = json.loads((undisturbed / "drift.json").read_text())
    columns = {
        name: np.array(values) for name, values in pq.read_table(undisturbed / "tokens").to_pydict().items()
    }
    order = np.lexsort((columns["position"], columns["sample"]))
    columns = {name: values[order] for name, values in columns.items()}
    for arm in ("native", "plugin"):
        logp_r = {}
        for path in ("recorded", "chunked_prefill", "decode_replay"):
            chosen = (columns["arm"] == arm) & (columns["path"] == path)
            logp_t, logp_r[path] = columns["logp_trainer"][chosen], columns["logp_rollout"][chosen]
            d = logp_t - logp_r[path]
            assert np.array_equal(d, columns["dlogp"][chosen])
            _assert_stats(result["arms"][arm]["paths"][path]["dlogp"], d)
            ratio = np.exp(d)
            gap = np.abs(np.exp(logp_t) - np.exp(logp_r[path]))
            expected = {
                "kl_k1": (-d).mean(),
                "kl_k2": (d**2 / 2).mean(),
                "kl_k3": (np.exp(d) - 1 - d).mean(),
                "ratio_min": ratio.min(),
                "ratio_mean": ratio.mean(),
                "ratio_max": ratio.max(),
                "ess": ratio.sum() ** 2 / (ratio**2).sum() / d.size,
                "prob_mean_abs": gap.mean(),
                "prob_max_abs": gap.max(),
            }
            _assert_equal(result["arms"][arm]["paths"][path]["policy"], expected)
        steps = result["arms"][arm]["steps"]
        _assert_stats(steps["full_minus_chunked"], logp_t - logp_r["chunked_prefill"])
        _assert_stats(
            steps["chunked_minus_decode_replay"], logp_r["chunked_prefill"] - logp_r["decode_replay"]
        )
        _assert_stats(steps["decode_replay_minus_recorded"], logp_r["decode_replay"] - logp_r["recorded"])
        whole = result["arms"][arm]["paths"]["recorded"]["dlogp"]["mean"]
        assert sum(step["mean"] for step in steps.values()) == pytest.approx(whole, abs=1e-12)


def _assert_stats(stats: dict[str, Any], d: np.ndarray) -> None:
    size = np.abs(d)
    _assert_equal(
        stats,
        {
            "active_count": d.size,
            "bit_equal": (d == 0).sum(),
            "mean": d.mean(),
            "mean_abs": size.mean(),
            "rms": math.sqrt((d**2).mean()),
            "p50_abs": np.quantile(size, 0.5),
            "p95_abs": np.quantile(size, 0.95),
            "p99_abs": np.quantile(size, 0.99),
            "p999_abs": np.quantile(size, 0.999),
            "max_abs": size.max(),
        },
    )


def _assert_equal(stats: dict[str, Any], expected: dict[str, Any]) -> None:
    assert stats.keys() == expected.keys()
    for name, value in expected.items():
        assert stats[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_finished_run_is_shown_again_without_work(
    undisturbed: Path, tiny_model: Path, short_prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = [undisturbed / "manifest.json", *sorted((undisturbed / "tokens").iterdir())]
    before = [path.read_bytes() for path in measured], [path.stat().st_mtime_ns for path in measured]
    assert cli.main(_arguments(tiny_model, short_prompts, undisturbed)) == 0
    assert "holds the finished run of this configuration" in _said(capsys)
    assert before[1] == [path.stat().st_mtime_ns for path in measured]
    assert cli.main(_arguments(tiny_model, short_prompts, undisturbed, "--min-tokens", "100000")) == 3
    assert read_manifest(undisturbed)["config"]["min_tokens"] == 100000  # what drift.json was judged by
    assert cli.main(_arguments(tiny_model, short_prompts, undisturbed)) == 0
    assert before[0] == [path.read_bytes() for path in measured]


@pytest.mark.parametrize("damage", ["lost", "cut", "stray"])
def test_a_finished_run_is_judged_on_all_its_shards_and_no_others(
    job: Job, undisturbed: Path, tmp_path: Path, damage: str
) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    parts = sorted((tmp_path / "run" / "tokens").iterdir())
    if damage == "lost":
        parts[-1].unlink()
    elif damage == "cut":
        parts[0].write_bytes(parts[0].read_bytes()[:200])
    else:
        shutil.copy(parts[0], parts[0].with_name("part-00099.parquet"))
    status, run = job()
    assert status == 0
    if damage == "stray":
        (run / "tokens" / "part-00099.parquet").unlink()
    _assert_same_result(run, undisturbed)


def test_an_oracle_that_was_asked_for_and_is_missing(
    job: Job, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers are compared in the trainer's worker, after the tokens; a finished run needs nothing else done again."""
    shutil.copytree(undisturbed, tmp_path / "run")
    status, run = job("--te-oracle")
    said = _said(capsys)
    assert status == 3 and "transformer_engine is not installed" in said and "paged_kv_merge" in said
    assert read_tokens(run).equals(read_tokens(undisturbed))
    assert read_manifest(run)["created"] == read_manifest(undisturbed)["created"]
    reports = json.loads((run / "comparisons.json").read_text())["reports"]
    assert [found["label"] for found in reports] == ["layer-00", "layer-01"]
    for found in reports:
        rows = {row["name"]: row for row in found["drifts"]}
        for name in ("chunked_prefill", "paged_kv", "decode_replay"):
            assert rows[name]["out"]["bit_equal"] and rows[name]["check"]["passed"]
        assert found["shapes"]["padding"] > 0
    page = (run / "report.html").read_text()
    assert "Layers, every way" in page and "decode_replay" in page
    before = (run / "comparisons.json").stat().st_mtime_ns
    assert job("--te-oracle")[0] == 3 and (run / "comparisons.json").stat().st_mtime_ns == before
    assert job()[0] == 0  # what was not asked for does not count
    status, _ = job("--te-oracle", "--te-oracle-layers", "1", "7")
    assert status == 1 and "--te-oracle: layers must be -2 to 1, got [7]" in _said(capsys)


def test_rerun_measures_again_and_keeps_the_old(job: Job, undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    time.sleep(1.1)  # "created" has seconds
    assert job("--rerun")[0] == 0
    (kept,) = tmp_path.glob("run.*")
    assert read_manifest(kept)["created"] < read_manifest(tmp_path / "run")["created"]
    _assert_same_result(kept, undisturbed)
    _assert_same_result(tmp_path / "run", undisturbed)


@pytest.mark.parametrize(("fault", "dtype"), [("weights", "bfloat16"), ("rope", "float32")])
def test_a_broken_trainer_is_drift(job: Job, fault: str, dtype: str) -> None:
    status, run = job("--inject-fault", fault, "--dtype", dtype)
    assert status == 2
    assert json.loads((run / "drift.json").read_text())["verdict"] == "DRIFT"


def test_sides_that_differ_are_refused(
    job: Job, make_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    other = make_model(tmp_path / "other", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)
    status, run = job("--rollout-model", str(other))
    assert status == 1
    said = _said(capsys)
    assert "trainer and rollout are not the same model" in said
    assert "weights_sha256" in said and "tokenizer_sha256" in said and "architecture" not in said
    assert not list((run / "tokens").iterdir())


@pytest.mark.parametrize("field", ["weights_sha256", "tokenizer_sha256", "architecture", "dtype"])
def test_each_difference_is_refused_by_name(field: str) -> None:
    same = PolicyIdentity(weights_sha256="w", tokenizer_sha256="t", architecture="a", dtype="d")
    check_identities(same, same)
    with pytest.raises(JobError, match=f"\n  {field}: trainer ., rollout other$"):
        check_identities(same, replace(same, **{field: "other"}))


def test_killed_workers_are_replaced_and_their_shard_done_again(
    job: Job, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kills = [
        _KillWhen(tmp_path / "run/tokens/part-00000.parquet", "TrainerWorker"),
        _KillWhen(tmp_path / "run/tokens/part-00001.parquet", "RolloutWorker"),
    ]
    status, run = job()
    assert status == 0 and all(kill.result() for kill in kills)
    said = _said(capsys)
    assert "the trainer died" in said and "the rollout died" in said and "(try 2 of 3)" in said
    _assert_same_result(run, undisturbed)


def test_worker_that_keeps_dying_ends_the_job_and_keeps_shards(
    job: Job, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill = _KillWhen(tmp_path / "run/tokens/part-00000.parquet", "RolloutWorker")
    status, run = job("--tries", "1")
    assert kill.result() and status == 1
    assert "the rollout died in all 1 tries of one shard" in _said(capsys)
    (kept,) = (run / "tokens").iterdir()
    assert pq.read_table(kept).equals(pq.read_table(undisturbed / "tokens" / kept.name))


class _KillWhen:
    """Kills a Ray worker of this process, from a thread, as soon as a file is there."""

    def __init__(self, file: Path, name: str) -> None:
        self._killed: int | None = None
        self._thread = threading.Thread(target=self._watch, args=(file, name), daemon=True)
        self._thread.start()

    def _watch(self, file: Path, name: str) -> None:
        deadline = time.monotonic() + 60
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        for process in psutil.Process().children(recursive=True):
            if process.name().startswith(f"ray::{name}"):
                process.kill()
                self._killed = process.pid

    def result(self) -> int | None:
        self._thread.join(60)
        return self._killed


def _said(capsys: pytest.CaptureFixture[str]) -> str:
    output = capsys.readouterr()
    return " ".join((output.out + output.err).split())


@pytest.mark.parametrize("way", ["interrupt", "terminate", "kill"])
def test_job_stopped_midway_resumes_to_the_same_result(
    job: Job, undisturbed: Path, tiny_model: Path, short_prompts: Path, tmp_path: Path, way: str
) -> None:
    """Ctrl-C reaches the whole process group, as a terminal sends it; SIGTERM and SIGKILL only the job, whose
    Ray must die with it."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "rl_attn_plugin.cli", *_arguments(tiny_model, short_prompts, run)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # a suite that runs in the background has Ctrl-C ignored, and its children would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (run / "tokens/part-00000.parquet").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    # Ray's agents also go, but only look for their parent every now and then.
    family = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.name().startswith(("ray::Trainer", "ray::Rollout", "raylet", "gcs_server"))
    ]
    assert len(family) == 4
    if way == "interrupt":
        os.killpg(process.pid, signal.SIGINT)
    elif way == "terminate":
        process.terminate()
    else:
        process.kill()
    output, _ = process.communicate(timeout=60)
    if way != "kill":
        assert process.returncode == 130, output
        assert "the same command resumes" in " ".join(output.split())
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    assert not (run / "drift.json").exists()
    assert read_manifest(run)["state"] == "running"
    assert len(list((run / "tokens").glob("part-*.parquet"))) < 3
    kept = (run / "tokens/part-00000.parquet").stat().st_mtime_ns
    assert job()[0] == 0
    assert (run / "tokens/part-00000.parquet").stat().st_mtime_ns == kept
    _assert_same_result(run, undisturbed)


def test_full_disk_keeps_finished_shards_and_resumes(
    job: Job, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full from the second shard on."""
    real = os.replace
    write = os.write
    parts: list[str] = []

    def count(source: str, target: str) -> None:
        parts.append(str(target))
        real(source, target)

    def full(descriptor: int, data: Any) -> int:
        if sum("part-" in name for name in parts) >= 1 and len(data) > 5000:
            write(descriptor, bytes(data)[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", count)
        patch.setattr(os, "write", full)
        status, run = job()
    assert status == 1
    assert "the disk is full" in _said(capsys)
    assert [path.name for path in (run / "tokens").iterdir()] == ["part-00000.parquet"]
    pq.read_table(run / "tokens/part-00000.parquet")
    assert job()[0] == 0
    _assert_same_result(run, undisturbed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--model": "/nowhere/model"}, "/nowhere/model"),
        ({"--prompts": "/nowhere/prompts.jsonl"}, "/nowhere/prompts.jsonl: no such prompts file"),
        ({"--max-new-tokens": "5000"}, "must fit the model's context of 512"),
        ({"--out": "/proc/run"}, "the run directory /proc/run cannot be made"),
        ({"--temperature": "0"}, "--temperature must be a finite number above 0"),
        ({"--temperature": "warm"}, "warm"),
        ({"--no-such-option": "1"}, "--no-such-option"),
        ({"--device": "tpu"}, "tpu"),
    ],
)
def test_bad_input_exits_1_and_says_what(
    tiny_model: Path,
    short_prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    message: str,
) -> None:
    arguments = _arguments(tiny_model, short_prompts, tmp_path / "run")
    for name, value in changes.items():
        arguments = _replace(arguments, name, value)
    assert cli.main(arguments) == 1
    assert message in _said(capsys)
    assert not (tmp_path / "run" / "manifest.json").exists()


def _replace(arguments: list[str], name: str, value: str) -> list[str]:
    if name not in arguments:
        return [*arguments, name, value]
    at = arguments.index(name) + 1
    return [*arguments[:at], value, *arguments[at + 1 :]]


def test_another_run_is_refused_and_left_as_it_is(
    undisturbed: Path, tiny_model: Path, short_prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    assert cli.main(_arguments(tiny_model, short_prompts, undisturbed, "--temperature", "0.5")) == 1
    said = _said(capsys)
    assert "holds another run" in said and "temperature: 1.0 there, 0.5 now" in said
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == before


def test_folder_that_is_no_run_is_refused(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert job()[0] == 1
    assert "is not a run directory" in _said(capsys)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_help_teaches_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["parity", "--help"]) == 0
    said = _said(capsys)
    for words in (
        "--model",
        "--prompts",
        "--top-p",
        "Exit status: 0 PASS, 2 DRIFT, 3 INCONCLUSIVE",
        "--inject-fault",
    ):
        assert words in said

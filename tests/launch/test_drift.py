"""``rl-attn drift`` from end to end: exit statuses, both files, and every bad input in words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_attn_plugin import cli
from rl_attn_plugin.launch.drift import rules_of
from rl_attn_plugin.monitor import DEFAULT_RULES
from rl_attn_plugin.offline import InputError


def write(
    path: Path, *, steps: int = 3, noise: float = 0.01, late: float | None = None, seed: int = 0
) -> Path:
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(steps):
        spread = late if late is not None and step >= steps // 2 else noise
        for number in range(12):
            rollout = -rng.exponential(1.2, 150) - 1e-3
            trainer = np.minimum(rollout + spread * rng.standard_normal(150), -1e-6)
            rows.append(
                {
                    "step": step, "sample": number, "logp_trainer": trainer.tolist(), "logp_rollout": rollout.tolist(),
                    "token_ids": rng.integers(0, 99, 150).tolist(), "env": ["math", "code"][number % 2],
                }
            )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    status = cli.main(["drift", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, " ".join((captured.out + captured.err).split())


def test_a_clean_run_passes_and_leaves_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, write(tmp_path / "a.jsonl"), "--out", tmp_path / "out", "--groups", "env")
    assert status == 0 and "PASS" in said
    found = json.loads(
        (tmp_path / "out" / "drift.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert found["verdict"] == "PASS" and found["schema"] == "rl-attn/drift-files/1"
    assert found["run"]["metrics"]["tokens/compared"] == 3 * 12 * 150
    assert [step["step"] for step in found["run"]["steps"]] == [0, 1, 2]
    assert {bin_["label"] for bin_ in found["run"]["tables"]["env"]} == {"math", "code"}
    counts = [bin_["positive"] + bin_["negative"] for bin_ in found["run"]["histogram"]]
    assert sum(counts) == 5400 and all(counts)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "PASS" in page and "Content-Security-Policy" in page


def test_a_late_fault_is_drift_and_the_other_run_informs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write(tmp_path / "good.jsonl"), write(tmp_path / "bad.jsonl", late=0.4, seed=1)
    status, said = run(capsys, bad, "--against", good, "--out", tmp_path / "out")
    assert status == 2 and "DRIFT" in said
    found = json.loads((tmp_path / "out" / "drift.json").read_text())
    assert found["run"]["verdict"] == "DRIFT" and found["against"]["verdict"] == "PASS"
    assert run(capsys, good, "--against", bad, "--out", tmp_path / "out")[0] == 0


def test_few_tokens_and_invalid_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl")
    assert run(capsys, path, "--out", tmp_path / "o", "--min-tokens", "100000")[0] == 3
    path.write_text(
        path.read_text() + json.dumps({"step": 0, "logp_trainer": [-1.0], "logp_rollout": [None]}) + "\n"
    )
    status, said = run(capsys, path, "--out", tmp_path / "o")
    assert status == 1 and "INVALID" in said and "rollout missing" in said


def test_damage_is_an_error_until_it_may_be_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl")
    path.write_text(path.read_text()[:-30])
    status, said = run(capsys, path, "--out", tmp_path / "o")
    assert (
        status == 1 and "line 36: is not JSON (the file ends within it)" in said and "--skip-damaged" in said
    )
    assert not (tmp_path / "o").exists()
    status, said = run(capsys, path, "--out", tmp_path / "o", "--skip-damaged")
    assert status == 0 and "line 36" in said
    assert "line 36" in (tmp_path / "o" / "report.html").read_text()


def test_numbers_beyond_all_bounds_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """exp(dlogp) overflows, and a threshold may be infinite."""
    row = {"step": 0, "logp_trainer": [-1.0, -1.0], "logp_rollout": [-900.0, -1.0]}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in range(3)))
    status, said = run(capsys, path, "--out", tmp_path / "o", "--min-tokens", "1", "--over-threshold", "inf")
    assert status == 2 and "kl/k3 is inf, above 0.015" in said and "∞" in said
    found = json.loads(
        (tmp_path / "o" / "drift.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert found["run"]["metrics"]["kl/k3"] == "inf" and found["over_threshold"] == "inf"
    assert "∞" in (tmp_path / "o" / "report.html").read_text()


def test_a_bound_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl")
    status, said = run(capsys, path, "--out", tmp_path / "o", "--rule", "dlogp/abs_mean<=0.001")
    assert status == 2 and "0.001" in said
    rules = {
        (rule.metric, rule.below): rule for rule in rules_of(["dlogp/abs_mean<=0.001", "turn/ess >= 0.2"])
    }
    assert len(rules) == len(DEFAULT_RULES) + 1
    assert rules["dlogp/abs_mean", False].bound == 0.001 and rules["turn/ess", True].bound == 0.2


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("dlogp/abs_mean=1", "--rule must be like \"dlogp/abs_mean<=0.02\" or \"ess>=0.5\", got 'dlogp/abs_mean=1'"),
        ("dlogp/abs_mean<=x", "the bound must be a number, got 'x'"),
        ("dlogp/abs_mean<=nan", "the bound must be a number, got nan"),
        ("dlogp/mean_abs<=1", "there is no metric 'dlogp/mean_abs'; there are tokens/active, tokens/compared"),
    ],
)  # fmt: skip
def test_rules_that_are_none(rule: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        rules_of([rule])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give files *.parquet, *.jsonl, *.jsonl.gz, or folders of them"),
        (["none.jsonl"], "none.jsonl is not there"),
        (["FILE", "--groups", "turn"], "--groups turn: no file has that column"),
        (["FILE", "--groups", "env", "env"], "--groups must name each column once"),
        (["FILE", "--groups", "position"], "--groups must be columns, got 'position'"),
        (["FILE", "--min-tokens", "0"], "--min-tokens must be at least 1, got 0"),
        (["FILE", "--over-threshold", "-1"], "--over-threshold must be at least 0, got -1.0"),
        (["FILE", "--trainer-column", "x"], "must have the column 'x' for logp_trainer"),
        (["FILE", "--tokenizer", "/not/there"], "--tokenizer must be a folder or hub id, got '/not/there'"),
        (["FILE", "--out", "FILE"], "cannot be written: File exists"),
    ],
)
def test_bad_input_exits_1_and_says_what(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", steps=1)
    given = [str(path) if argument == "FILE" else argument for argument in arguments]
    out = [] if "--out" in given else ["--out", str(tmp_path / "o")]
    status, said = run(capsys, *given, *out)
    assert status == 1 and message in said.replace("│ ", "").replace(" │", ""), said
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_what_is_interrupted_leaves_nothing(sent: signal.Signals, tmp_path: Path) -> None:
    """While it waits for more of a file that is still written."""
    lines = write(tmp_path / "a.jsonl").read_text()
    pipe, scratch = tmp_path / "pipe.jsonl", tmp_path / "scratch"
    os.mkfifo(pipe)
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; from rl_attn_plugin.cli import main; sys.exit(main())",
         "drift", str(pipe), "--out", str(tmp_path / "o")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"TMPDIR": str(scratch)},
        # a suite that runs in the background has Ctrl-C ignored, and its children would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    with pipe.open("w") as writer:  # waits for the reader
        writer.write(lines)
        writer.flush()
        process.send_signal(sent)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted: nothing was written" in said, said
    assert not (tmp_path / "o").exists() and not list(scratch.iterdir())


def test_model_text_does_not_reach_the_terminal_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"logp_trainer": -1.0 - 0.01 * i, "logp_rollout": -1.0, "token_id": i, "text": "\x1b[31m[bold]<b>&"}
        for i in range(20)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, said = run(capsys, path, "--out", tmp_path / "o", "--min-tokens", "1")
    assert "\x1b[31m" not in said and "[bold]" in said
    assert "<b>&" not in (tmp_path / "o" / "report.html").read_text()

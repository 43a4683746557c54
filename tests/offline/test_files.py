"""Files of log-probs: the same tokens give the same numbers whatever the format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_attn_plugin.monitor import Rule
from rl_attn_plugin.offline import Options, Wanted, measure
from rl_attn_plugin.offline import steps as steps_module
from rl_attn_plugin.offline.pieces import PIECE_TOKENS
from rl_attn_plugin.offline.sources import step_of
from tests.offline.runs import (
    FEW,
    WRITERS,
    Sample,
    active,
    jsonl,
    same,
    sequence_rows,
)


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_numpys_numbers(kind: str, samples: list[Sample], tmp_path: Path) -> None:
    name, write, rows = WRITERS[kind]
    run = measure(
        [write(tmp_path / name, rows(samples))], Options(min_tokens=1, wanted=Wanted(groups=["env"]))
    )
    trainer, rollout = active(samples)
    d = trainer - rollout
    assert run.metrics["tokens/compared"] == len(d)
    assert run.metrics["dlogp/mean"] == pytest.approx(d.mean(), abs=1e-12)
    assert run.metrics["dlogp/abs_max"] == np.abs(d).max()
    assert run.metrics["kl/k3"] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-9)
    assert run.metrics["sequence/count"] == sum(s.mask.any() for s in samples)
    longest = max(abs((s.trainer - s.rollout)[s.mask.astype(bool)].sum()) for s in samples)
    both = (run.metrics["sequence/log_ratio_min"], run.metrics["sequence/log_ratio_max"])
    assert max(map(abs, both)) == pytest.approx(longest, abs=1e-12)
    assert [step.step for step in run.steps] == [0, 1, 2]
    for step in run.steps:
        t, r = active([s for s in samples if s.step == step.step])
        assert step.metrics["dlogp/abs_mean"] == pytest.approx(np.abs(t - r).mean(), abs=1e-12)
    groups = {bin_.label: bin_ for bin_ in run.tables["env"]}
    assert set(groups) == {"math", "code", "été"}
    t, r = active([s for s in samples if s.env == "été"])
    assert groups["été"].count == len(t) and groups["été"].mean == pytest.approx((t - r).mean(), abs=1e-12)
    worst = run.worst[0]
    at = int(np.abs(d).argmax())
    assert (worst.logp_trainer, worst.logp_rollout) == (trainer[at], rollout[at])
    assert worst.token_id == np.concatenate([s.ids[s.mask.astype(bool)] for s in samples])[at]
    assert (worst.text is not None) == ("tokens" in kind)  # only those rows have texts
    if worst.text is not None:
        assert worst.text == f"<{worst.token_id}>"
    assert sum(run.positive) + sum(run.negative) == len(d)
    assert not run.problems and run.files[0].columns["logp_trainer"] == "logp_trainer"


def test_formats_agree(samples: list[Sample], tmp_path: Path) -> None:
    runs = []
    for i, (name, write, rows) in enumerate(WRITERS.values()):
        (tmp_path / str(i)).mkdir()
        runs.append(measure([write(tmp_path / str(i) / name, rows(samples))], FEW))
    for run in runs[1:]:
        same(run, runs[0])


def test_sequences_longer_than_a_piece_are_not_cut(tmp_path: Path) -> None:
    """A sequence cut in two would count as two, and its log-ratio be halved."""
    rng = np.random.default_rng(0)
    lengths = [10, 3 * PIECE_TOKENS + 17, 5, PIECE_TOKENS, 1]
    rollout = -rng.exponential(1, sum(lengths))
    rows = pa.table(
        {
            "sample": np.repeat(np.arange(len(lengths)), lengths),
            "logp_rollout": rollout,
            "logp_trainer": rollout - 0.001,
        }
    )
    pq.write_table(rows, tmp_path / "long.parquet", row_group_size=50_000)
    run = measure([tmp_path / "long.parquet"])
    assert run.metrics["sequence/count"] == len(lengths)
    assert run.metrics["sequence/log_ratio_min"] == pytest.approx(-0.001 * max(lengths), rel=1e-9)
    assert run.steps == []  # nothing says a step


def test_steps_from_names_of_files_and_folders(samples: list[Sample], tmp_path: Path) -> None:
    for step in range(3):
        rows = [
            {key: value for key, value in row.items() if key != "step"}
            for row in sequence_rows([s for s in samples if s.step == step])
        ]
        jsonl(tmp_path / "verl" / f"{step + 8}.jsonl", rows)
        jsonl(tmp_path / "nemo" / f"train_data_step{step + 8}.jsonl", rows)
        jsonl(tmp_path / "prime" / f"step_{step + 8}" / "rank_0.jsonl", rows[::2])
        jsonl(tmp_path / "prime" / f"step_{step + 8}" / "rank_1.jsonl", rows[1::2])
        (tmp_path / "prime" / f"step_{step + 8}" / "STABLE").touch()
    runs = [measure([tmp_path / name], FEW) for name in ("verl", "nemo", "prime")]
    for run in runs:
        assert [step.step for step in run.steps] == [8, 9, 10]
        same(run, runs[0])
        for step, other in zip(run.steps, runs[0].steps, strict=True):
            assert step.metrics["dlogp/abs_mean"] == pytest.approx(other.metrics["dlogp/abs_mean"], rel=1e-11)
    assert (
        step_of(Path("a/9223372036854775808.jsonl")) is None
        and step_of(Path("9223372036854775807.jsonl")) == 2**63 - 1
    )
    assert step_of(Path("a/rollout.jsonl")) is None and step_of(Path("x/step=3/data.parquet")) == 3


def test_names_that_frameworks_write(samples: list[Sample], tmp_path: Path) -> None:
    rows = sequence_rows(samples)
    expected = measure([jsonl(tmp_path / "ours.jsonl", rows)], FEW)
    verl = [
        {
            "input": "q", "output": "a", "score": 1.0, "step": row["step"], "old_log_probs": row["logp_trainer"],
            "rollout_log_probs": row["logp_rollout"], "response_mask": row["mask"], "responses": row["token_ids"],
        }
        for row in rows
    ]  # fmt: skip
    nemo = [
        {
            "idx": i, "step": row["step"], "prev_logprobs": [row["logp_trainer"]], "token_ids": [row["token_ids"]],
            "generation_logprobs": [row["logp_rollout"]], "token_loss_mask": [[float(m) for m in row["mask"]]],
        }
        for i, row in enumerate(rows)
    ]  # fmt: skip
    prime = [
        {
            "schema_version": 1, "step": row["step"], "export_sequence_idx": i, "token_ids": row["token_ids"],
            "trainer_logprobs": row["logp_trainer"], "inference_logprobs": row["logp_rollout"],
            "loss_mask": [bool(m) for m in row["mask"]], "env_name": row["env"],
        }
        for i, row in enumerate(rows)
    ]  # fmt: skip
    for name, found in (("verl", verl), ("nemo", nemo), ("prime", prime)):
        same(measure([jsonl(tmp_path / f"{name}.jsonl", found)], FEW), expected)
    mine = [{"mine": r["logp_trainer"], "theirs": r["logp_rollout"], "on": r["mask"]} for r in rows]
    wanted = Wanted(names={"logp_trainer": "mine", "logp_rollout": "theirs", "mask": "on"})
    same(measure([jsonl(tmp_path / "own.jsonl", mine)], Options(min_tokens=1, wanted=wanted)), expected)


def test_a_late_fault_is_drift_though_the_whole_is_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = []
    for step in range(20):
        rollout = -rng.exponential(1, 2000) - 0.01
        noise = 0.5 if step == 19 else 0.002
        rows.append(
            {
                "step": step,
                "logp_rollout": rollout.tolist(),
                "logp_trainer": np.minimum(rollout + noise * rng.standard_normal(2000), -1e-6).tolist(),
            }
        )
    rules = (Rule(metric="dlogp/abs_mean", bound=0.05),)
    run = measure([jsonl(tmp_path / "a.jsonl", rows)], Options(rules=rules))
    assert run.metrics["dlogp/abs_mean"] < 0.05
    assert run.verdict == "DRIFT" and "dlogp/abs_mean is beyond its bound from step 19" in run.reasons[0]
    (check,) = run.checks
    assert check.worst_step == 19 and check.fired == 1 and check.passed is False
    assert [step.verdict for step in run.steps] == ["PASS"] * 19 + ["DRIFT"]
    assert run.alerts[0].startswith("step 19: dlogp/abs_mean is ")


def test_few_tokens_are_inconclusive(samples: list[Sample], tmp_path: Path) -> None:
    run = measure([jsonl(tmp_path / "a.jsonl", sequence_rows(samples[:2]))])
    assert run.verdict == "INCONCLUSIVE" and "1000 needed" in run.reasons[0]


def test_more_steps_than_are_held_in_memory(
    samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(
        tmp_path / "a.jsonl", sequence_rows(sorted(samples, key=lambda s: s.number))
    )  # steps interleave
    expected = measure([path], FEW)
    monkeypatch.setattr(steps_module, "_OPEN", 1)
    found = measure([path], FEW)
    assert (
        found.metrics == expected.metrics and found.steps == expected.steps and found.worst == expected.worst
    )

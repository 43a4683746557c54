"""Files of log-probs: the same tokens give the same numbers whatever the format; damage is named, by file and row."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_attn_plugin.monitor import Rule
from rl_attn_plugin.offline import InputError, Options, RunDrift, Wanted, measure
from rl_attn_plugin.offline import steps as steps_module
from rl_attn_plugin.offline.pieces import PIECE_TOKENS
from rl_attn_plugin.offline.sources import step_of

FEW = Options(min_tokens=1)


class Sample:
    """One answer with a prompt before it."""

    def __init__(self, rng: np.random.Generator, step: int, number: int) -> None:
        length = int(rng.integers(1, 40))
        self.step, self.number = step, number
        self.rollout = (-rng.exponential(1.5, length) - 1e-3).round(6)
        self.trainer = np.minimum(self.rollout + 0.02 * rng.standard_normal(length), -1e-6).round(6)
        self.mask = (np.arange(length) >= length // 4).astype(int)
        self.ids = rng.integers(0, 300, length)
        self.env = ("math", "code", "été")[number % 3]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(7)
    return [Sample(rng, step, number) for step in range(3) for number in range(60)]


def sequence_rows(samples: list[Sample]) -> list[dict[str, Any]]:
    return [
        {
            "step": s.step, "sample": s.number, "logp_trainer": s.trainer.tolist(), "logp_rollout": s.rollout.tolist(),
            "mask": s.mask.tolist(), "token_ids": s.ids.tolist(), "env": s.env,
        }
        for s in samples
    ]  # fmt: skip


def token_rows(samples: list[Sample]) -> list[dict[str, Any]]:
    return [
        {
            "step": s.step, "sample": s.number, "logp_trainer": t, "logp_rollout": r, "mask": m, "token_id": i,
            "text": f"<{i}>", "env": s.env,
        }
        for s in samples
        for t, r, m, i in zip(s.trainer.tolist(), s.rollout.tolist(), s.mask.tolist(), s.ids.tolist(), strict=True)
    ]  # fmt: skip


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def gzipped(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


WRITERS: dict[str, tuple[str, Callable[[Path, list[dict[str, Any]]], Path], Callable[[list[Sample]], Any]]] = {
    "jsonl, sequences": ("a.jsonl", jsonl, sequence_rows),
    "jsonl, tokens": ("a.jsonl", jsonl, token_rows),
    "gzip": ("a.jsonl.gz", gzipped, sequence_rows),
    "parquet, sequences": ("a.parquet", parquet, sequence_rows),
    "parquet, tokens": ("a.parquet", lambda path, rows: parquet(path, rows, row_group_size=333), token_rows),
}  # fmt: skip


def numbers(run: RunDrift) -> Any:
    """Metrics, but for how many updates they took and the last bits of a sum's order."""
    found = {name: value for name, value in run.metrics.items() if not name.startswith("updates/")}
    return pytest.approx(found, rel=1e-11, abs=1e-13)


def same(one: RunDrift, other: RunDrift) -> None:
    mine = {name: value for name, value in one.metrics.items() if not name.startswith("updates/")}
    assert mine == numbers(other)


def active(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    chosen = [s.mask.astype(bool) for s in samples]
    return (
        np.concatenate([s.trainer[m] for s, m in zip(samples, chosen, strict=True)]),
        np.concatenate([s.rollout[m] for s, m in zip(samples, chosen, strict=True)]),
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


# what is not a log-prob


def invalid_of(run: RunDrift) -> dict[str, float]:
    return {name: value for name, value in run.metrics.items() if name.startswith("invalid/") and value}


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_values_that_are_none_are_counted_by_name(
    write: Callable[[Path, list[dict[str, Any]]], Path], tmp_path: Path
) -> None:
    rows = [
        {"logp_trainer": [-1.0, None, -2.0, -1.0], "logp_rollout": [-1.0, -1.0, -9999.0, -1.0]},
        {"logp_trainer": [-1.0, -1.0, -3.0, -1.0], "logp_rollout": [float("nan"), 0.5, 0.0, -1.0]},
        {"logp_trainer": [-1.0, -1.0], "logp_rollout": None},
    ]
    name = "a.jsonl" if write is jsonl else "a.parquet"
    run = measure([write(tmp_path / name, rows)], FEW)
    assert run.verdict == "INVALID"
    assert invalid_of(run) == {
        "invalid/trainer_missing": 1, "invalid/rollout_missing": 2, "invalid/rollout_sentinel": 1,
        "invalid/rollout_nan": 1, "invalid/rollout_positive": 1, "invalid/rollout_zero_fill": 1,
    }  # fmt: skip
    assert run.metrics["tokens/compared"] == 3 and len(run.invalid) == 7


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_lists_of_unlike_lengths_are_invalid_and_named(
    write: Callable[[Path, list[dict[str, Any]]], Path], tmp_path: Path
) -> None:
    rows = [
        {"logp_trainer": [-1.0, -1.0], "logp_rollout": [-1.0, -1.0], "mask": [1, 1]},
        {"logp_trainer": [-1.0, -1.0], "logp_rollout": [-1.0], "mask": [1, 1]},
        {"logp_trainer": [-1.0], "logp_rollout": [-1.0], "mask": [1, 1, 1]},
    ]
    name = "a.jsonl" if write is jsonl else "a.parquet"
    run = measure([write(tmp_path / name, rows)], FEW)
    assert run.verdict == "INVALID" and invalid_of(run) == {"invalid/shape": 5}
    first, second = (str(problem) for problem in run.problems)
    place = "line 2" if write is jsonl else "row 1"
    assert first.endswith(
        f"{name}, {place}: lists must have one length, got logp_trainer 2, logp_rollout 1, mask 2"
    )
    assert second.endswith("got logp_trainer 1, logp_rollout 1, mask 3")


def test_a_mask_that_is_none_is_counted(tmp_path: Path) -> None:
    rows = [{"logp_trainer": [-1.0] * 3, "logp_rollout": [-1.0] * 3, "mask": [1, None, 0.5]}]
    for run in (
        measure([jsonl(tmp_path / "a.jsonl", rows)], FEW),
        measure([parquet(tmp_path / "a.parquet", rows)], FEW),
    ):
        assert run.verdict == "INVALID" and invalid_of(run) == {"invalid/mask": 2}


# damage


DAMAGE = [
    (b'{"logp_trainer": [-1.0], "logp_ro', "line 3: is not JSON (the file ends within it)"),
    (b"\x00\xff\n", "line 3: is not JSON"),
    (b"[1, 2]\n", "line 3: must be a JSON object, got '[1, 2]"),
    (b'{"logp_trainer": "x", "logp_rollout": [-1.0]}\n', "line 3: logp_trainer must be a list, got 'x'"),
    (b'{"logp_trainer": ["-1.0"], "logp_rollout": [-1.0]}\n', "line 3: logp_trainer must hold numbers, got '-1.0'"),
    (b'{"logp_trainer": [[1], [2, 3]], "logp_rollout": [-1.0, 1]}\n', "line 3: logp_trainer must hold numbers"),
    (b'{"logp_trainer": null, "logp_rollout": null}\n', "line 3: must have log-probs of one side at least"),
    (b'{"step": "two", "logp_trainer": [-1.0], "logp_rollout": [-1.0]}\n', "line 3: step must be an integer, got 'two'"),
    (b'{"step": 9223372036854775808, "logp_trainer": [-1.0], "logp_rollout": [-1.0]}\n',
     "line 3: step must be an integer of 64 bits, got 9223372036854775808"),
    (b'{"token_ids": [99999999999999999999], "logp_trainer": [-1.0], "logp_rollout": [-1.0]}\n',
     "line 3: token_ids must hold numbers, got '[99999999999999999999]'"),
    (b'{"token_ids": [1.5], "logp_trainer": [-1.0], "logp_rollout": [-1.0]}\n', "line 3: token_ids must hold integers"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), DAMAGE)
def test_damaged_lines_are_named_and_the_rest_is_read_when_asked(
    line: bytes, message: str, tmp_path: Path
) -> None:
    good = {"logp_trainer": [-1.0, -2.0], "logp_rollout": [-1.0, -2.0], "token_ids": [1, 2], "step": 1}
    path = jsonl(tmp_path / "a.jsonl", [good, good])
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(InputError, match="--skip-damaged judges the rest") as caught:
        measure([path], FEW)
    assert f"{path}, {message}" in str(caught.value)
    run = measure([path], Options(min_tokens=1, skip_damaged=True))
    assert run.metrics["tokens/compared"] == 4 and message in str(run.problems[0])


def test_a_truncated_or_tampered_table_is_named(samples: list[Sample], tmp_path: Path) -> None:
    rows = token_rows(samples)
    whole = parquet(tmp_path / "whole.parquet", rows)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"cut\.parquet: is not a whole Parquet file"):
        measure([cut], FEW)
    run = measure([whole, cut], Options(min_tokens=1, skip_damaged=True))
    same(run, measure([whole], FEW))
    assert len(run.problems) == 1

    grouped = parquet(
        tmp_path / "grouped.parquet", rows, row_group_size=500, write_page_checksum=True, compression="none"
    )
    content = bytearray(grouped.read_bytes())
    group = pq.ParquetFile(grouped).metadata.row_group(1)
    names = [group.column(i).path_in_schema for i in range(group.num_columns)]
    column = group.column(names.index("logp_trainer"))
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 0x10
    grouped.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"grouped\.parquet, rows 500 to 999: cannot be read: .*CRC|crc"):
        measure([grouped], FEW)
    run = measure([grouped], Options(min_tokens=1, skip_damaged=True))
    rest = measure([parquet(tmp_path / "rest.parquet", rows[:500] + rows[1000:])], FEW)
    assert run.metrics["tokens/compared"] == rest.metrics["tokens/compared"]


def test_a_truncated_gzip_is_named(samples: list[Sample], tmp_path: Path) -> None:
    path = gzipped(tmp_path / "a.jsonl.gz", sequence_rows(samples))
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(InputError, match=r"a\.jsonl\.gz, line \d+ and after: cannot be read"):
        measure([path], FEW)
    assert measure([path], Options(min_tokens=1, skip_damaged=True)).metrics["tokens/compared"] > 100


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "none.jsonl", "is not there: give files *.parquet, *.jsonl, *.jsonl.gz, or folders of them"),
        (lambda p: p, "must hold files *.parquet, *.jsonl, *.jsonl.gz, got none"),
        (lambda p: _touch(p / "a.csv"), "must be a file *.parquet, *.jsonl, *.jsonl.gz, got '.csv'"),
        (lambda p: _touch(p / "a.jsonl"), "must hold a JSON object a line, got an empty file"),
        (
            lambda p: jsonl(p / "1.jsonl", [{"input": "q", "output": "a", "score": 1.0}]),
            "got the columns input, output, score. Name yours with --trainer-column and --rollout-column; generations "
            "dumped without log-probs cannot be compared",
        ),
        (
            lambda p: parquet(p / "a.parquet", [{"logp_trainer": "x", "logp_rollout": -1.0}]),
            "logp_trainer must hold numbers or lists of numbers, got string",
        ),
        (
            lambda p: parquet(p / "a.parquet", [{"logp_trainer": [-1.0], "logp_rollout": -1.0}]),
            "must all be numbers (a token a row) or all be lists (a sequence a row)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        measure([make(tmp_path)], FEW)
    assert message in str(caught.value)


def test_columns_and_groups_that_are_not_there(samples: list[Sample], tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", sequence_rows(samples))
    with pytest.raises(InputError, match="must have the column 'x' for mask, got the columns step, sample"):
        measure([path], Options(wanted=Wanted(names={"mask": "x"})))
    with pytest.raises(InputError, match="--groups turn: no file has that column with a value in it"):
        measure([path], Options(wanted=Wanted(groups=["turn"])))


def test_groups_of_numbers_are_in_their_order(tmp_path: Path) -> None:
    rows = [
        {"logp_trainer": [-1.0] * 3, "logp_rollout": [-1.1] * 3, "lag": lag, "turn": [0, 1, 10]}
        for lag in (10, 9, 2, 0)
    ]
    for path in (jsonl(tmp_path / "a.jsonl", rows), parquet(tmp_path / "a.parquet", rows)):
        run = measure([path], Options(min_tokens=1, wanted=Wanted(groups=["lag", "turn"])))
        assert [bin_.label for bin_ in run.tables["lag"]] == ["0", "2", "9", "10"]
        assert [(bin_.label, bin_.count) for bin_ in run.tables["turn"]] == [("0", 4), ("1", 4), ("10", 4)]


def test_a_parity_runs_rows_are_those_of_one_arm(samples: list[Sample], tmp_path: Path) -> None:
    rows = []
    for sample in samples[:20]:
        for arm, shift in (("native", 0.5), ("plugin", 0.0)):
            for path in ("recorded", "decode_replay"):
                rows += [
                    {**row, "arm": arm, "path": path, "logp_rollout": row["logp_rollout"] - shift}
                    for row in token_rows([sample])
                ]
    alone = measure([parquet(tmp_path / "alone.parquet", token_rows(samples[:20]))], FEW)
    run = tmp_path / "run"
    parquet(run / "tokens" / "part-00000.parquet", rows[: len(rows) // 2])
    parquet(run / "tokens" / "part-00001.parquet", rows[len(rows) // 2 :])
    (run / "manifest.json").write_text("{}")
    (run / "other.jsonl").write_text("not of the tokens")
    same(measure([run], FEW), alone)
    same(measure([jsonl(tmp_path / "a.jsonl", rows)], FEW), alone)
    native = measure([run], Options(min_tokens=1, wanted=Wanted(arm="native")))
    assert native.metrics["dlogp/mean"] == pytest.approx(alone.metrics["dlogp/mean"] + 0.5)
    shutil.rmtree(run / "tokens")
    with pytest.raises(
        InputError, match=r"no row is of --arm x and --path recorded; there are .*native/recorded"
    ):
        measure([tmp_path / "a.jsonl"], Options(wanted=Wanted(arm="x")))


def _touch(path: Path) -> Path:
    path.touch()
    return path

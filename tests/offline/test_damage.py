"""Values that are no log-probs are counted; damage is named, by file and row."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rl_attn_plugin.offline import InputError, Options, RunDrift, Wanted, measure
from tests.offline.runs import (
    FEW,
    Sample,
    gzipped,
    jsonl,
    parquet,
    same,
    sequence_rows,
    token_rows,
)


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

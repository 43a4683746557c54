"""Runs with known numbers, and the formats that they are written in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_attn_plugin.offline import Options, RunDrift

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

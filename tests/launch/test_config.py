"""The configuration: refusals with the option's name, and which fields make another run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from rl_attn_plugin.launch.config import Batching, JobConfig, Runtime, Sampling


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampling(temperature=0.0), "--temperature must be a finite number above 0"),
        (lambda: Sampling(temperature=float("nan")), "--temperature must"),
        (lambda: Sampling(temperature=float("inf")), "--temperature must"),
        (lambda: Sampling(top_p=0.0), r"--top-p must be in \(0, 1\], got 0.0"),
        (lambda: Sampling(top_p=1.5), r"--top-p must be in \(0, 1\], got 1.5"),
        (lambda: Sampling(max_new_tokens=0), "--max-new-tokens must be at least 1, got 0"),
        (lambda: Sampling(seed=-1), "--seed must be in"),
        (lambda: Batching(shard_size=0), "--shard-size must be at least 1, got 0"),
        (lambda: Batching(chunk_size=0), "--chunk-size must be at least 1, got 0"),
        (lambda: Batching(page_size=-4), "--page-size must be 1 to 65536, got -4"),
        (lambda: Batching(page_size=10**12), "--page-size must be 1 to 65536, got 1000000000000"),
        (lambda: Runtime(tries=0), "--tries must be at least 1, got 0"),
        (lambda: JobConfig(model=""), "--model must name a model, got ''"),
        (lambda: JobConfig(max_prompts=0), "--max-prompts must be at least 1, got 0"),
        (lambda: JobConfig(min_tokens=0), "--min-tokens must be at least 1, got 0"),
    ],
)
def test_bad_values_are_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_config_is_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        JobConfig().model = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        JobConfig("smollm2")  # type: ignore[call-arg]


def test_what_decides_the_numbers_decides_the_directory() -> None:
    base = JobConfig()
    assert base.run_directory() == JobConfig().run_directory()
    for other in (
        JobConfig(model="elsewhere"),
        JobConfig(prompts=Path("p.jsonl")),
        JobConfig(sampling=Sampling(temperature=0.7)),
        JobConfig(batching=Batching(page_size=32)),
        JobConfig(runtime=Runtime(inject_fault="rope")),
        JobConfig(runtime=Runtime(dtype="float32")),
    ):
        assert other.run_directory() != base.run_directory(), other
    for same in (JobConfig(rerun=True), JobConfig(min_tokens=5), JobConfig(runtime=Runtime(tries=1))):
        assert same.run_directory() == base.run_directory(), same


def test_out_wins(tmp_path: Path) -> None:
    assert JobConfig(out=tmp_path / "x").run_directory() == tmp_path / "x"


def test_to_dict_is_json(tmp_path: Path) -> None:
    plain = JobConfig(out=tmp_path, prompts=tmp_path / "p.jsonl").to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["sampling"]["top_p"] == 0.95
    assert plain["out"] == str(tmp_path)

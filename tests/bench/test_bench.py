"""The benchmark's promises that need no GPU to be checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_attn_plugin.bench import peers
from rl_attn_plugin.bench.run import OURS, Bench, BenchConfig, run
from rl_attn_plugin.reference import attention_reference


def test_no_speed_without_parity(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rl_attn_plugin.bench.run.in_turns", lambda runs, **_: dict.fromkeys(runs, 2.0))
    monkeypatch.setattr("rl_attn_plugin.bench.run.sustained", lambda runs, **_: dict.fromkeys(runs, 4.0))
    bench = Bench(BenchConfig())
    bench.measure(
        "case", {OURS: lambda: None, "wrong": lambda: None}, {OURS: 0.002, "wrong": 0.5}, 4e12, "TFLOP/s"
    )
    ours, wrong = bench.rows
    assert ours["TFLOP/s"] == 2000.0 and ours["sustained TFLOP/s"] == 1000.0
    assert wrong["parity"] is False and "ms" not in wrong and "TFLOP/s" not in wrong
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_says_that_there_is_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BenchConfig(out=tmp_path / "bench.json")) == 1
    assert "no CUDA device" in capsys.readouterr().err
    assert run(BenchConfig(out=tmp_path / "bench.json", only=("sideways",))) == 1
    assert "sideways" in capsys.readouterr().err


def test_the_exact_tail_is_the_oracle_s() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(30, h, 16) for h in (4, 2, 2))
    wanted, _ = attention_reference(q, k, v)
    torch.testing.assert_close(peers.exact_tail(q, k, v, 7, 3), wanted[-7:, :3])

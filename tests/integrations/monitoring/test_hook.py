"""What every loop shares: the end of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rl_attn_plugin.integrations.monitoring import DriftHook
from rl_attn_plugin.monitor import DriftError, Rule, Watch
from rl_attn_plugin.monitor.sinks import JsonLinesSink


def test_the_step_that_stops_a_run_is_written_before_it_does(tmp_path: Path) -> None:
    rule = Rule(metric="dlogp/abs_mean", bound=0.1, action="raise")
    path = tmp_path / "drift.jsonl"
    with JsonLinesSink(path) as sink:
        hook = DriftHook(watch=Watch([rule], min_tokens=1), sinks=[sink])
        for apart in (0.0, 0.5):
            logp = torch.full((2, 3), -1.0)
            hook.monitor.update(logp, logp - apart, torch.ones(2, 3), step=hook.steps + 1)
            if not apart:
                assert hook.end_step().verdict == "PASS"
        with pytest.raises(DriftError, match=r"step 2: dlogp/abs_mean is 0\.5, above 0\.1") as raised:
            hook.end_step()
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(step["step"], step["verdict"]) for step in steps] == [(1, "PASS"), (2, "DRIFT")]
    assert hook.last is raised.value.judgement and hook.last.verdict == "DRIFT" and hook.steps == 2
    assert hook.monitor.compute()["tokens/active"] == 0  # and the next step starts afresh

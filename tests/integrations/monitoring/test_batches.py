"""Batches of verl, NeMo-RL and Megatron-RL: every token where it belongs, and what is missing counted as missing."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_attn_plugin.integrations.monitoring import (
    DriftHook,
    update_from_nemo_rl,
    update_from_verl,
    watch_megatron_rl,
    watch_verl,
)
from rl_attn_plugin.monitor import DriftMonitor, Watch


def logps(*shape: int) -> tuple[Tensor, Tensor]:
    rollout = -torch.rand(shape) * 3 - 0.01
    return (rollout + 0.02 * torch.randn(shape)).clamp(max=-1e-4), rollout


def test_nemo_rl() -> None:
    torch.manual_seed(0)
    trainer, rollout = logps(4, 10)
    trainer[:, 0], rollout[:, 0] = 0.0, 0.0  # no token before the first
    token_mask = torch.zeros(4, 10)
    token_mask[:, 4:9] = 1
    sample_mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    monitor = DriftMonitor()
    data = {
        "prev_logprobs": trainer, "generation_logprobs": rollout, "token_mask": token_mask, "sample_mask": sample_mask,
        "input_ids": torch.randint(0, 99, (4, 10)),
    }  # fmt: skip
    update_from_nemo_rl(monitor, data, step=3)
    rows = [0, 1, 3]
    d = (trainer.double() - rollout.double())[rows, 4:9]
    found = monitor.compute()
    assert found["tokens/compared"] == 15 and found["sequence/count"] == 3
    assert found["dlogp/abs_mean"] == pytest.approx(float(d.abs().mean()), rel=1e-12)
    assert monitor.worst()[0].step == 3 and monitor.worst()[0].token_id is not None


class Batch:
    """What `update_from_verl` uses of a DataProto; test_verl_itself uses the real one."""

    def __init__(self, **tensors: Tensor) -> None:
        self.batch = tensors


@pytest.mark.parametrize("rollout_given", [True, False])
def test_verl_batches(rollout_given: bool) -> None:
    torch.manual_seed(0)
    trainer, rollout = logps(3, 8)
    attention = torch.ones(3, 13, dtype=torch.long)
    attention[1, -3:] = 0
    data = {"old_log_probs": trainer, "responses": torch.randint(0, 9, (3, 8)), "attention_mask": attention}
    if rollout_given:
        data["rollout_log_probs"] = rollout
    monitor = DriftMonitor()
    update_from_verl(monitor, Batch(**data), step=1)
    found = monitor.compute()
    assert found["tokens/active"] == 21
    if rollout_given:
        assert found["tokens/compared"] == 21 and found["sequence/count"] == 3
    else:
        assert found["tokens/compared"] == 0 and found["invalid/rollout_missing"] == 21


def test_verl_itself() -> None:
    """Its own trainer's call gives its numbers and ours."""
    protocol = pytest.importorskip("verl.protocol", reason="needs verl: pip install verl")
    metrics = pytest.importorskip("verl.utils.debug.metrics")
    torch.manual_seed(0)
    trainer, rollout = logps(4, 16)
    mask = (torch.arange(16) < torch.tensor([[5], [16], [9], [12]])).long()
    data = protocol.DataProto.from_dict(
        {
            "old_log_probs": trainer, "rollout_log_probs": rollout, "response_mask": mask,
            "responses": torch.randint(0, 9, (4, 16)),
        }
    )  # fmt: skip
    theirs = metrics.calculate_debug_metrics(data)
    original = metrics.calculate_debug_metrics
    try:
        hook = watch_verl(DriftHook(watch=Watch(min_tokens=10)))
        both = metrics.calculate_debug_metrics(data)
    finally:
        metrics.calculate_debug_metrics = original
    assert theirs.items() <= both.items()
    assert both["drift/prob/abs_mean"] == pytest.approx(theirs["training/rollout_probs_diff_mean"], rel=1e-5)
    assert both["drift/prob/abs_max"] == pytest.approx(theirs["training/rollout_probs_diff_max"], rel=1e-5)
    assert hook.last is not None and hook.last.metrics["tokens/compared"] == 42 and hook.steps == 1


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The functions of ``megatron.rl.rl_utils`` that are watched, with its signatures: it is in no package."""
    package, module = types.ModuleType("megatron.rl"), types.ModuleType("megatron.rl.rl_utils")
    calls: list[str] = []

    def align(
        inference_logprobs: Any, old_logprobs_for_data: Tensor, generation_masks: Any, group_stats: Any
    ) -> Any:
        calls.append("align")
        return old_logprobs_for_data.clone()

    def packed(a: Any, b: Any, c: Any, group_stats: Any, filled_mask: Any = None) -> None:
        calls.append("packed")

    def log(group_stats: Any, current_iteration: int, tokenizer: Any, example_groups: Any) -> None:
        calls.append("log")

    module.align_unpacked_inference_logprobs = align  # type: ignore[attr-defined]
    module.compute_packed_inference_logprobs_stats = packed  # type: ignore[attr-defined]
    module.maybe_log_training_metrics = log  # type: ignore[attr-defined]
    module.calls = calls  # type: ignore[attr-defined]
    package.rl_utils = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.rl", package)
    monkeypatch.setitem(sys.modules, "megatron.rl.rl_utils", module)
    return module


def test_megatron_rl_rows(megatron: Any) -> None:
    """The log-prob of the token at p stands at p - 1; what inference did not return is missing, not the trainer's."""
    pytest.importorskip("megatron.core")
    hook = watch_megatron_rl(DriftHook(watch=Watch(min_tokens=1)))
    old = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-1.0, -1.0, -1.0, -1.0]])
    masks = torch.tensor(
        [[0, 0, 1, 0, 1], [0, 1, 1, 1, 0]]
    ).bool()  # two turns; an end that only the trainer has
    inference = [torch.tensor([-2.5, -4.0]), torch.tensor([-1.0, -1.25])]
    megatron.align_unpacked_inference_logprobs(inference, old, masks, None)
    megatron.maybe_log_training_metrics(None, 7, None, None)
    assert megatron.calls == ["align", "log"] and hook.last is not None
    found = hook.last.metrics
    assert hook.last.step == 7 and hook.last.verdict == "INVALID"
    assert found["tokens/active"] == 5 and found["tokens/compared"] == 4
    assert found["invalid/rollout_missing"] == 1 and found["tokens/bit_equal"] == 2
    assert found["dlogp/mean"] == pytest.approx((0.5 + 0.25) / 4)


def test_megatron_rl_bins(megatron: Any) -> None:
    pytest.importorskip("megatron.core")
    hook = watch_megatron_rl(DriftHook(watch=Watch(min_tokens=1)))
    old = torch.tensor([[-1.0, -2.0, -3.0]]).bfloat16()
    inference = torch.tensor([[-1.0, 0.0, -3.5]])
    loss_mask = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    filled = torch.tensor([[True, False, True]])
    megatron.compute_packed_inference_logprobs_stats(old, inference, loss_mask, None, filled)
    found = hook.end_step().metrics
    assert megatron.calls == ["packed"]
    assert found["tokens/compared"] == 2 and found["invalid/rollout_missing"] == 1
    assert found["dlogp/abs_max"] == 0.5 and "sequence/count" not in found


def test_frameworks_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    monkeypatch.setitem(sys.modules, "megatron.rl", None)
    with pytest.raises(ImportError, match="pip install verl"):
        watch_verl()
    with pytest.raises(ImportError, match="Megatron-LM's repository"):
        watch_megatron_rl()

"""update() reads nothing back: it runs on tensors that hold no data at all, and never makes a GPU wait."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from rl_attn_plugin.monitor import DriftMonitor
from tests.monitor.test_invariance import GROUPS, assert_same
from tests.monitor.world import packed, padded, sequences


def moved(arguments, device: str):
    if isinstance(arguments, torch.Tensor):
        return arguments.to(device)
    if isinstance(arguments, dict):
        return {key: moved(value, device) for key, value in arguments.items()}
    return tuple(moved(value, device) for value in arguments)


@pytest.mark.parametrize("layout", [padded, packed])
def test_update_needs_no_value(layout) -> None:
    """Meta tensors have no data: reading one value back raises."""
    args, more = moved(layout(sequences(0, 9)), "meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        args[0].sum().item()
    monitor = DriftMonitor(groups=GROUPS)
    for _ in range(2):
        monitor.update(*args, step=1, **more)
        monitor.update(args[0], None, args[2], step=1)
        monitor.update(args[0], args[1][..., :-1], args[2], step=1)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [padded, packed])
def test_a_gpu_is_not_waited_for_and_gives_the_same(layout) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    host_args, host_more = layout(sequences(0, 200, longest=300))
    args, more = moved(host_args, "cuda"), moved(host_more, "cuda")
    monitor, host = DriftMonitor(groups=GROUPS), DriftMonitor(groups=GROUPS)
    monitor.update(*args, step=1, **more)
    torch.cuda.set_sync_debug_mode("error")
    try:
        monitor.update(*args, step=1, **more)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):
        host.update(*host_args, step=1, **host_more)
    assert_same(host, monitor)


def test_gradients_are_not_recorded() -> None:
    logp = (-torch.rand(4) - 0.1).requires_grad_()
    monitor = DriftMonitor()
    monitor.update(logp, -torch.ones(4), torch.ones(4), step=0)
    assert not monitor.state().sums.requires_grad


def test_monitor_needs_torch_and_numpy_alone() -> None:
    frameworks = (
        "transformers",
        "ray",
        "pyarrow",
        "trl",
        "verl",
        "vllm",
        "megatron",
        "rich",
        "jinja2",
        "triton",
    )
    code = (
        "import sys, torch; before = set(sys.modules); import rl_attn_plugin.monitor\n"
        f"print([m for m in {frameworks} if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr + done.stdout


@pytest.mark.slow
def test_update_is_fast() -> None:
    """A quarter of what an idle core does, so that a busy machine does not fail it: see docs/monitoring.md."""
    torch.manual_seed(0)
    trainer = -torch.rand(64, 1024) - 1e-3
    rollout = (trainer + 0.02 * torch.randn(64, 1024)).clamp(max=-1e-3)
    mask = torch.rand(64, 1024) < 0.8
    monitor, best = DriftMonitor(), float("inf")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(20):
            start = time.thread_time()
            monitor.update(trainer, rollout, mask, step=0)
            best = min(best, time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    assert trainer.numel() / best > 1.2e6

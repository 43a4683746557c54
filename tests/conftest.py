"""Markers that skip with a reason, and memory that is poisoned before it is used."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

_NEEDS = {
    "megatron": ("megatron", "megatron-core"),
    "te": ("transformer_engine", "TransformerEngine"),
    "vllm": ("vllm", "vLLM"),
}
_POISONED = ("rl_attn_plugin.eager", "rl_attn_plugin.kernels", "rl_attn_plugin.ops", "rl_attn_plugin.replay")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, torch sees none")
    for marker, (module, name) in _NEEDS.items():
        if item.get_closest_marker(marker) and importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {name}, which is not installed")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.empty` and its kin give NaN to our own code: a row that is never written fails a comparison."""

    def poison(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = original(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            # a fake tensor, as in tracing, has no memory to poison
            ours = caller.startswith(_POISONED) and type(made) is torch.Tensor
            if ours and made.is_floating_point() and made.dtype.itemsize > 1:
                made.fill_(torch.nan)
            return made

        return empty

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
    yield

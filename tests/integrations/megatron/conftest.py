"""One process of Megatron, with or without a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

# Megatron-core says at import what it does without; here that is no error.
with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401


class CudaIsCpu(TorchFunctionMode):
    """Makes on the CPU what Megatron asks of "cuda" by name; its own code runs as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


class CpuEvent:
    """On a CPU everything that was asked for has happened."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


@pytest.fixture(scope="package", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install 'rl-attn-plugin[megatron]'")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    on_gpu = torch.cuda.is_available()
    store = torch.distributed.FileStore(
        str(tmp_path_factory.mktemp("store") / "store"), 1
    )  # no port to collide on
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with contextlib.ExitStack() as stack:
        if on_gpu:
            megatron_random.model_parallel_cuda_manual_seed(0)
        else:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(torch.cuda, "current_device", lambda: "cuda")
            patch.setattr(torch.cuda, "Event", CpuEvent)
            patch.setattr(torch.cuda.random, "get_rng_state", lambda device: torch.empty(0))
            megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
            stack.enter_context(CudaIsCpu())
        yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def no_te(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's MLA takes its own stub of TransformerEngine for TransformerEngine, and trips over it."""
    if importlib.util.find_spec("transformer_engine") is None:
        monkeypatch.setattr("megatron.core.transformer.multi_latent_attention.HAVE_TE", False)

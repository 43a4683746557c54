"""Choosing an implementation, and calling it. Imports a kernel package only when one of its ops runs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import torch

from rl_attn_plugin.types import Impl

_log = logging.getLogger("rl_attn_plugin")
_NAMES = {impl.value: impl for impl in Impl}
_F = TypeVar("_F", bound=Callable[..., object])


def _constant_when_traced(function: _F) -> _F:
    """What ``torch.compiler.assume_constant_result`` does, without its import of dynamo, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def triton_reasons(device: torch.device) -> list[str]:
    """Why ``impl="triton"`` cannot serve tensors on ``device``; empty if it can."""
    reasons = []
    if importlib.util.find_spec("triton") is None:
        reasons.append("triton is not installed: pip install triton")
    if device.type not in ("cuda", "xpu") and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(
            f"triton needs a GPU or TRITON_INTERPRET=1 in the environment, got tensors on {device.type}"
        )
    return reasons


def resolve_impl(impl: Impl | str, device: torch.device) -> Impl:
    """The implementation that will run.

    Raises:
        ValueError: an unknown name, or an explicit choice that cannot be met, with every reason.
    """
    wanted = (
        impl if isinstance(impl, Impl) else _NAMES.get(impl)
    )  # no Impl(..): torch.compile cannot trace it
    if wanted is None:
        raise ValueError(f"impl must be one of {', '.join(map(repr, _NAMES))}, got {impl!r}")
    if wanted is Impl.TRITON:
        reasons = triton_reasons(device)
        if reasons:
            raise ValueError("impl='triton' cannot be used here: " + "; ".join(reasons))
        return wanted
    if wanted is Impl.TORCH:
        return wanted
    return Impl.TRITON if _auto(device.type) == Impl.TRITON.value else Impl.TORCH


@_constant_when_traced
def _auto(device_type: str) -> str:  # a plain string: torch.compile takes no enum as a constant
    if device_type == "cpu":
        return Impl.TORCH.value
    reasons = triton_reasons(torch.device(device_type))
    chosen = (Impl.TORCH if reasons else Impl.TRITON).value
    _say_once(device_type, chosen, "; ".join(reasons))
    return chosen


@functools.cache
def _say_once(device_type: str, chosen: str, reasons: str) -> None:
    _log.info("impl='auto' took %r on %s%s", chosen, device_type, f" ({reasons})" if reasons else "")


@_constant_when_traced
def arch(device: torch.device) -> str:
    """The architecture that the default schedule depends on: ``cpu``, ``sm_90``, ``gfx942``."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def implementation(impl: str, module: str) -> ModuleType:
    """The module of the same name in `rl_attn_plugin.kernels` or `rl_attn_plugin.eager`."""
    package = "kernels" if impl == Impl.TRITON.value else "eager"
    return importlib.import_module(f"rl_attn_plugin.{package}.{module}")

"""Launching kernels that take many arguments by name, without paying Triton's binding on every call."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.kernels.tiles import INTERPRET

_compiled: dict[tuple[Any, ...], Any] = {}


@functools.cache
def _roles(kernel: Any) -> tuple[tuple[str, ...], ...]:
    """Argument names: all in order, those whose values are compiled in, those specialised by value class, and
    those specialised by their type alone."""
    free = [p for p in kernel.params if not p.is_constexpr and not p.do_not_specialize]
    fixed = tuple(p.name for p in kernel.params if p.is_constexpr)
    special = tuple(p.name for p in free if not p.do_not_specialize_on_alignment)
    typed = tuple(p.name for p in free if p.do_not_specialize_on_alignment)
    return tuple(kernel.arg_names), fixed, special, typed


def _trait(value: Any) -> Any:
    """What of a value the compiled code may depend on; at least as fine as Triton's own distinction."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() & 15
    if isinstance(value, int):
        return value if value in (0, 1) else (value & 15, value.bit_length() > 31)
    return None if value is None else float


def launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], *, warps: int, stages: int) -> None:
    """Run ``kernel`` over ``grid``; arguments it does not know are ignored.

    Fused multiply-adds are off for the compiler everywhere: where one is meant, the kernel says so.

    Args:
        kernel: a `triton.jit` function.
        grid: one to three sizes.
        arguments: by name.
        warps: of a program.
        stages: of software pipelining.
    """
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    if INTERPRET or torch.version.hip:
        kernel[grid](**{n: arguments[n] for n in kernel.arg_names}, **options)
        return
    names, fixed, special, typed = _roles(kernel)
    key = (
        id(kernel), torch.cuda.current_device(), warps, stages,
        tuple([arguments[n] for n in fixed]), tuple([_trait(arguments[n]) for n in special]),
        tuple([getattr(arguments[n], "dtype", None) for n in typed]),
    )  # fmt: skip
    values = [arguments[n] for n in names]
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*values, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*values)

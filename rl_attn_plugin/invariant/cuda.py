"""Row-invariant replacements on a GPU. Elementwise functions need none: every element takes the same code there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.kernels.matmul import matmul
from rl_attn_plugin.kernels.rows import norm, row_sum, softmax

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def replacement(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """What runs instead of an ATen operator with these arguments; None where nothing does."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    if not tensors or any(x.dtype not in _DTYPES for x in tensors if x.is_floating_point()):
        return None
    found = _REPLACED.get(name)
    if found is None:
        return None
    wanted, function = found
    return function if wanted(args, kwargs) else None


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _over_last(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The second argument names the last dim alone."""
    x, dims = args[0], args[1] if len(args) > 1 else None
    listed = [dims] if isinstance(dims, int) else list(dims or [])
    return len(listed) == 1 and x.dim() > 0 and listed[0] % x.dim() == x.dim() - 1 and x.is_floating_point()


def _over_one(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A norm over the last dim alone."""
    return len(args[1]) == 1


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return matmul(a, b, bias, alpha=alpha, beta=beta)


def _sum(x: Tensor, dims: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    found = row_sum(x, 1.0, dtype)
    return found[..., None] if keepdim else found


def _mean(x: Tensor, dims: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    found = row_sum(x, 1.0 / x.shape[-1], dtype)
    return found[..., None] if keepdim else found


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return softmax(x, log=False, dtype=torch.float32 if half_to_float else None)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return softmax(x, log=True, dtype=torch.float32 if half_to_float else None)


def _softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    weighted = grad.float() * y.float()
    return (weighted - y.float() * row_sum(weighted)[..., None]).to(dtype)


def _log_softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return (grad.float() - torch.exp(y.float()) * row_sum(grad.float())[..., None]).to(dtype)


def _layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return norm(x, weight, bias, eps, center=True)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    out, _, rstd = norm(x, weight, None, eps, center=False)
    return out, rstd


_Test = Callable[[tuple[Any, ...], dict[str, Any]], bool]
_REPLACED: dict[str, tuple[_Test, Callable[..., Any]]] = {
    "mm": (_always, matmul),
    "bmm": (_always, matmul),
    "addmm": (_always, _addmm),
    "baddbmm": (_always, _addmm),
    "sum": (_over_last, _sum),
    "mean": (_over_last, _mean),
    "_softmax": (_over_last, _softmax),
    "_log_softmax": (_over_last, _log_softmax),
    "_softmax_backward_data": (lambda args, _: args[2] % args[0].dim() == args[0].dim() - 1, _softmax_backward),
    "_log_softmax_backward_data": (
        lambda args, _: args[2] % args[0].dim() == args[0].dim() - 1, _log_softmax_backward,
    ),
    "native_layer_norm": (_over_one, _layer_norm),
    "_fused_rms_norm": (_over_one, _rms_norm),
}  # fmt: skip

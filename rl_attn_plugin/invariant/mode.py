"""The mode itself: a dispatch mode that replaces what depends on the number of rows, and notes everything else."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_attn_plugin.invariant import cpu, kinds
from rl_attn_plugin.invariant.audit import Audit, AuditReport, NotInvariant, caller
from rl_attn_plugin.invariant.kinds import Kind

_CPU: dict[str, Callable[..., Tensor]] = {
    "mm": cpu.mm,
    "addmm": cpu.addmm,
    "bmm": cpu.bmm,
    "baddbmm": cpu.baddbmm,
    "sigmoid": cpu.sigmoid,
    "silu": cpu.silu,
    "softplus": cpu.softplus,
    "exp2": cpu.exp2,
    "rsqrt": cpu.rsqrt,
    "gelu": cpu.gelu,
    "silu_backward": cpu.silu_backward,
    "softplus_backward": cpu.softplus_backward,
    "gelu_backward": cpu.gelu_backward,
    "sigmoid_": lambda x: x.copy_(cpu.sigmoid(x)),
    "silu_": lambda x: x.copy_(cpu.silu(x)),
    "exp2_": lambda x: x.copy_(cpu.exp2(x)),
    "rsqrt_": lambda x: x.copy_(cpu.rsqrt(x)),
}
_CLASHING = ("mm", "addmm", "bmm", "baddbmm", "_softmax", "_log_softmax", "mean", "sum")


class _Local(threading.local):
    """What a thread has active."""

    dispatch: _Dispatch | None = None
    holders = 0


_local = _Local()


class Mode:
    """One holder of the mode. `restore` gives it back; the last holder of a thread to do so ends it."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._audit = Audit()
        self._active = False

    def report(self) -> AuditReport:
        """Every operator that ran in this thread while this holder had the mode."""
        return self._audit.report()

    def restore(self) -> None:
        """Give the mode back; doing it again changes nothing, and holders may do so in any order.

        Raises:
            RuntimeError: called by another thread than the one that enabled it.
        """
        if not self._active:
            return
        dispatch = _local.dispatch
        if dispatch is None or self not in dispatch.holders:
            raise RuntimeError("batch_invariant must be restored by the thread that enabled it")
        self._active = False
        dispatch.holders.remove(self)
        if not dispatch.holders:
            _local.dispatch = None
            dispatch.leave()

    def _take(self) -> Mode:
        if _local.dispatch is None:
            _refuse_others()
            dispatch = _Dispatch()
            dispatch.enter()
            _local.dispatch = dispatch
        _local.dispatch.holders.append(self)
        self._active = True
        return self

    def note(self, operator: str, kind: Kind, reason: str | None) -> None:
        self._audit.note(operator, kind, reason)
        if self._strict and kind is Kind.UNKNOWN:
            because = f" ({reason})" if reason else ""
            raise NotInvariant(
                f"batch_invariant(strict=True): {operator} at {caller()} is not known to be row-invariant{because}"
            )


class batch_invariant:
    """Inside, a row of every known operator has the same bits however many rows come with it.

    Matrix products, and on a GPU norms, softmax and row sums, are replaced by ones with a fixed order of arithmetic; the
    rest is noted. TF32 and reductions in reduced precision are off meanwhile. It holds in the thread that enters it, in
    backward passes started there too; `torch.compile` is refused.

    Use as a context manager, which gives a `Mode`, or `enable` it in a worker process.

    Args:
        strict: raise at the first operator that is not known.

    Raises:
        RuntimeError: another library has replaced one of these operators; the text names it.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._held: list[Mode] = []

    def __enter__(self) -> Mode:
        mode = Mode(self._strict)._take()
        self._held.append(mode)
        return mode

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.pop().restore()

    @staticmethod
    def enable(*, strict: bool = False) -> Mode:
        """Switch it on until ``restore`` of the result is called."""
        return Mode(strict)._take()


class _Dispatch(TorchDispatchMode):
    """Replaces and notes operators for all holders of one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[Mode] = []
        self._inside = False
        self._restore = ExitStack()

    def enter(self) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "batch_invariant cannot be entered inside torch.compile: enter it around eager code"
            )
        matmul = torch.backends.cuda.matmul
        for holder, name, value in (
            (matmul, "allow_tf32", False),
            (torch.backends.cudnn, "allow_tf32", False),
            (matmul, "allow_bf16_reduced_precision_reduction", False),
            (matmul, "allow_fp16_reduced_precision_reduction", False),
        ):
            self._restore.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        self.__enter__()

    def leave(self) -> None:
        try:
            self.__exit__(None, None, None)
        finally:
            self._restore.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        namespace, _, name = func.name().partition("::")
        name = name.split(".")[0]
        kind, reason, replacement = self._judge(namespace, name, func, args, kwargs)
        for holder in self.holders:
            holder.note(f"{namespace}.{name}", kind, reason)
        if replacement is None:
            return func(*args, **kwargs)
        self._inside = True
        try:
            return replacement(*args, **kwargs)
        finally:
            self._inside = False

    def _judge(
        self, namespace: str, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Kind, str | None, Callable[..., Any] | None]:
        if namespace == "rl_attn":
            return Kind.CONSTRUCTION, None, None
        if namespace in ("prim", "prims", "profiler"):
            return Kind.ROWS, None, None
        if namespace != "aten":
            return Kind.UNKNOWN, f"an operator of {namespace}", None
        first = next((x for x in args if isinstance(x, Tensor)), None)
        device = "cpu" if first is None else first.device.type
        plain = first is None or (first.dtype != torch.float64 and not first.is_complex())
        if "out" in kwargs and name not in kinds.MOVES:
            return Kind.UNKNOWN, "written into out=", None
        if device == "cpu":
            if name in _CPU and plain and first is not None and first.is_floating_point():
                return Kind.REPLACED, None, _CPU[name]
        elif device == "cuda":
            from rl_attn_plugin.invariant import cuda

            replacement = cuda.replacement(name, args, kwargs) if plain else None
            if replacement is not None:
                return Kind.REPLACED, None, replacement
        if name.startswith("index_put") and (kwargs.get("accumulate") or args[3:4] == (True,)):
            return Kind.UNKNOWN, "adds up what is put into one place", None
        if device == "cpu" and name in kinds.PLACED_ON_CPU and not _simple_power(name, args):
            return Kind.UNKNOWN, "its last elements take other code than the rest, on a CPU", None
        if name in kinds.MOVES or name in kinds.ELEMENTWISE or name in kinds.EXACT:
            return Kind.ROWS, None, None
        if name in kinds.ROW_FUNCTIONS and device == "cpu":
            return _over_rows(name, args)
        if name in kinds.SUMS:
            return _over_sums(name, first, args, device)
        return Kind.UNKNOWN, None, None


def _simple_power(name: str, args: tuple[Any, ...]) -> bool:
    """Powers that are products, roots or quotients."""
    exponent = args[1] if name.startswith("pow") and len(args) > 1 else None
    return isinstance(exponent, int | float) and exponent in (-2, -1, -0.5, 0, 0.5, 1, 2, 3)


def _over_rows(name: str, args: tuple[Any, ...]) -> tuple[Kind, str | None, None]:
    if name in ("_softmax", "_log_softmax"):
        dims, dim = args[0].dim(), int(args[1])
        if dim % max(dims, 1) != dims - 1:
            return Kind.UNKNOWN, f"over dim {dim} of {dims}, not the last", None
    return Kind.ROWS, None, None


def _over_sums(
    name: str, x: Tensor | None, args: tuple[Any, ...], device: str
) -> tuple[Kind, str | None, None]:
    if x is None or not x.is_floating_point():
        return Kind.ROWS, None, None  # integers add up to the same in any order
    dims = args[1] if len(args) > 1 else None
    listed = [dims] if isinstance(dims, int) else list(dims or [])
    if not listed or any(d % x.dim() != x.dim() - 1 for d in listed):
        return Kind.UNKNOWN, f"sums over {listed or 'everything'}, not over rows alone", None
    if device != "cpu":
        return Kind.UNKNOWN, "a row sum whose order depends on the number of rows", None
    return Kind.ROWS, None, None


def _refuse_others() -> None:
    """Other libraries replace the same operators process-wide; two sets of replacements prove nothing."""
    taken = [
        key for key in torch.library._impls
        if key.startswith("aten/") and key.split("/")[1].split(".")[0] in _CLASHING
        and key.split("/")[2] in ("CPU", "CUDA")
    ]  # fmt: skip
    if not taken:
        return
    owners = set()
    for thing in gc.get_objects():
        if type(thing) is torch.library.Library and thing.ns == "aten" and thing._op_impls & set(taken):
            owners |= {
                name
                for name, module in list(sys.modules.items())
                if any(value is thing for value in list(vars(module).values()))
            }
    operators = ", ".join(sorted({key.split("/")[1] for key in taken}))
    raise RuntimeError(
        f"batch_invariant: {operators} of ATen have been replaced by {', '.join(sorted(owners)) or 'another library'}: "
        "switch that off first"
    )

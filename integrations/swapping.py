"""What a swap did, and how it is taken back; the same for every framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


@dataclass
class SwapHandle:
    """Returned by `swap_attention`; also a context manager.

    Attributes:
        replaced: names of what runs the plugin's attention now.
        left: names of what does not, with the reason.
    """

    replaced: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def restore(self) -> None:
        """Bring back the very same objects, last change first; doing it again changes nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> SwapHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} replaced: {', '.join(self.replaced) or 'none'}"]
        lines += [f"left {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def swap_attention(model: Any) -> SwapHandle:
    """Run a model's attention through the plugin, forward and backward; one line, and back again.

    ::

        handle = swap_attention(model)      # or: with swap_attention(model):
        ...
        handle.restore()

    Args:
        model: a transformers model, a Megatron-core model, or a module that holds TransformerEngine's
            ``DotProductAttention``.

    Returns:
        What was replaced, what was left and why, and the way back.

    Raises:
        TypeError: something else.
    """
    if not _bases(model) & {"transformers", "megatron"} and _holds_transformer_engine(model):
        from rl_attn_plugin.integrations.transformer_engine.swap import swap_attention as swap_te

        return swap_te(model)
    if framework_of(model, "swap_attention") == "transformers":
        from rl_attn_plugin.integrations.transformers.swap import swap_attention as swap_transformers

        return swap_transformers(model)
    from rl_attn_plugin.integrations.megatron.swap import swap_attention as swap_megatron

    return swap_megatron(model)


def framework_of(model: Any, function: str) -> str:
    """``"transformers"`` or ``"megatron"``, by the modules that the model's classes come from.

    Raises:
        TypeError: neither; the text names ``function``.
    """
    for name in ("transformers", "megatron"):
        if name in _bases(model):
            return name
    raise TypeError(
        f"{function} takes a transformers or a Megatron-core model, got {type(model).__module__}.{type(model).__qualname__}"
    )


def _bases(model: Any) -> set[str]:
    return {base.__module__.split(".")[0] for base in type(model).__mro__}


def _holds_transformer_engine(model: Any) -> bool:
    """Whether there is attention of TransformerEngine in it, or the plugin's in its place already."""
    modules = getattr(model, "modules", None)
    names = ("transformer_engine", "rl_attn_plugin.integrations.transformer_engine")
    return callable(modules) and any(
        base.__module__.startswith(names) for module in modules() for base in type(module).__mro__
    )

"""Finding the merge helpers of an installed TransformerEngine, whichever release it is.

TransformerEngine merges the partial attentions of its context parallelism with a few module-level functions. They are
not a public interface: where they live and what they take depends on the release, so they are looked for, looked at
and tried before they are trusted. Releases 2.2 to 2.19 have the two-phase form, 2.20 and later the incremental one.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.types import AttentionOutput

Helper = Callable[..., Any]

# Newest first; release 2.2 has the helpers in the second.
_MODULES = (
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
    "transformer_engine.pytorch.attention",
)

LSE = "flash_attn_fwd_softmax_lse_correction"
OUT_INIT = "flash_attn_fwd_out_correction_init"
OUT_ADD = "flash_attn_fwd_out_correction"
OUT_INCREMENTAL = "flash_attn_fwd_incremental_out_correction"

_SIGNATURES = {
    LSE: ("softmax_lse", "softmax_lse_per_step"),
    OUT_INIT: ("out_init_step", "softmax_lse", "softmax_lse_init_step", "seq_dim"),
    OUT_ADD: ("out", "out_per_step", "softmax_lse", "softmax_lse_per_step", "seq_dim"),
    OUT_INCREMENTAL: (
        "out",
        "out_per_step",
        "old_softmax_lse",
        "new_softmax_lse",
        "softmax_lse_per_step",
        "seq_dim",
    ),
}
_TWO_PHASE = (LSE, OUT_INIT, OUT_ADD)
_INCREMENTAL = (LSE, OUT_INCREMENTAL)

# rtol is what TransformerEngine's own tests allow fp32, atol a tenth of theirs: a compiled helper, whose exp and
# multiply-add round otherwise, stays within; a slip in the formula does not.
_RTOL, _ATOL = 1.3e-6, 1e-6


class Unusable(Exception):
    """Why TransformerEngine cannot serve, as one sentence."""


def locate() -> ModuleType:
    """Import the module that holds the helpers.

    Raises:
        Unusable: when TransformerEngine is absent or does not import.
    """
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # one of its own dependencies is missing
                raise Unusable(f"{name} does not import: {error}") from error
            if error.name == "transformer_engine":
                raise Unusable(
                    "transformer_engine is not installed: pip install 'rl-attn-plugin[te]'"
                ) from error
        # Its import loads CUDA libraries and fails in as many ways as there are broken installations.
        except Exception as error:
            raise Unusable(f"{name} does not import: {type(error).__name__}: {error}") from error
    raise Unusable(f"transformer_engine has none of the modules {', '.join(_MODULES)}")


def helpers(module: ModuleType) -> dict[str, Helper]:
    """The merge helpers by name, in one of the two forms.

    Raises:
        Unusable: when neither form is complete, or a helper is not a function.
    """
    form = _INCREMENTAL if OUT_INCREMENTAL in vars(module) else _TWO_PHASE
    missing = [name for name in form if name not in vars(module)]
    if missing:
        also = "" if form is _INCREMENTAL else f", nor {OUT_INCREMENTAL}"
        raise Unusable(f"{module.__name__} has no {', '.join(missing)}{also}")
    for name in form:
        if not callable(vars(module)[name]):
            kind = type(vars(module)[name]).__name__
            raise Unusable(f"{module.__name__}.{name} must be callable, got {kind}")
    return {name: vars(module)[name] for name in form}


def check_signatures(found: dict[str, Helper]) -> None:
    """Each helper takes exactly the arguments it is known by, in that order; others must have defaults.

    Releases before 2.2 used the same names for functions that take other arguments.

    Raises:
        Unusable: with the signature wanted and the one found.
    """
    for name, helper in found.items():
        wanted = _SIGNATURES[name]
        try:
            signature = inspect.signature(helper)
        except (TypeError, ValueError) as error:
            raise Unusable(f"{name} has no signature to check: {error}") from error
        parameters = list(signature.parameters.values())
        given, rest = parameters[: len(wanted)], parameters[len(wanted) :]
        by_position = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in given)
        if (
            tuple(p.name for p in given) != wanted
            or not by_position
            or any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in rest)
        ):
            got = ", ".join(signature.parameters)
            raise Unusable(f"{name} must take ({', '.join(wanted)}), got ({got})")


def is_compiled(found: dict[str, Helper]) -> bool:
    """Whether TransformerEngine wrapped its helpers for compilation (``NVTE_TORCH_COMPILE``, on by default)."""
    return any(inspect.unwrap(helper) is not helper for helper in found.values())


def self_test(
    merge: Callable[[Tensor, Tensor], AttentionOutput], name: str, device: torch.device | str
) -> None:
    """Merge a few small states and compare with fp64.

    Args:
        merge: of fp32 ``outs [P, B, S, H, D]`` and ``lses [P, B, H, S]``.
        name: of the merge, for the reason.
        device: where to run it.

    Raises:
        Unusable: when it raises, or is wrong by more than rounding.
    """
    generator = torch.Generator().manual_seed(0)
    # B, S, H and D differ: were S equal to H, a helper that took one for the other would broadcast unnoticed
    outs = torch.randn(4, 2, 5, 3, 7, generator=generator)
    lses = torch.randn(4, 2, 3, 5, generator=generator)
    lses[1, 0] = lses[2, :, 1] = -torch.inf
    lses[:, 1, 2, 3] = -torch.inf
    weights = lses.double().softmax(0).nan_to_num(0.0).transpose(-1, -2)
    expected = {"out": (outs.double() * weights[..., None]).sum(0), "lse": lses.double().logsumexp(0)}
    try:
        merged = merge(outs.to(device), lses.to(device))
        got = {"out": merged.out.cpu().double(), "lse": merged.lse.cpu().double()}
    # Whatever foreign code raises makes it unusable; it must not stop a comparison that can do without it.
    except Exception as error:
        raise Unusable(f"{name}: a helper raised {type(error).__name__}: {error}") from error
    for what, want in expected.items():
        if got[what].shape != want.shape:
            raise Unusable(f"{name}: {what} must be {list(want.shape)}, got {list(got[what].shape)}")
        far = ~torch.isclose(got[what], want, rtol=_RTOL, atol=_ATOL)
        if far.any():
            worst = (got[what] - want)[far].abs().max().item()
            raise Unusable(
                f"{name}: {what} is off by {worst:.3g} in the numeric self-test, "
                f"beyond atol {_ATOL:g} and rtol {_RTOL:g}"
            )

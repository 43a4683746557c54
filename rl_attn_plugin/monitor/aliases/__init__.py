"""The numbers that other frameworks print, from the same tensors, defects and all.

They are for lining up a dashboard with the monitor, not for judging by: docs/metrics.md says what is wrong with which,
and what to read instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.monitor.aliases.megatron_rl import megatron_rl
from rl_attn_plugin.monitor.aliases.nemo_rl import nemo_rl
from rl_attn_plugin.monitor.aliases.openrlhf import openrlhf
from rl_attn_plugin.monitor.aliases.parts import Numbers
from rl_attn_plugin.monitor.aliases.prime_rl import prime_rl
from rl_attn_plugin.monitor.aliases.skyrl import skyrl
from rl_attn_plugin.monitor.aliases.slime import slime
from rl_attn_plugin.monitor.aliases.torchtitan import torchtitan
from rl_attn_plugin.monitor.aliases.trl import trl
from rl_attn_plugin.monitor.aliases.verl import verl

_FRAMEWORKS: dict[str, Callable[..., Numbers]] = {
    "megatron_rl": megatron_rl,
    "nemo_rl": nemo_rl,
    "openrlhf": openrlhf,
    "prime_rl": prime_rl,
    "skyrl": skyrl,
    "slime": slime,
    "torchtitan": torchtitan,
    "trl": trl,
    "verl": verl,
}
FRAMEWORKS = tuple(_FRAMEWORKS)


@torch.no_grad()
def aliases(
    framework: str, logp_trainer: Tensor, logp_rollout: Tensor, mask: Tensor, **options: Any
) -> Numbers:
    """A framework's own numbers, in the dtype of the tensors. Reads values back: not for the hot path.

    Args:
        framework: one of `FRAMEWORKS`.
        logp_trainer: ``[B, S]``, one sequence a row.
        logp_rollout: ``[B, S]``.
        mask: ``[B, S]``, nonzero where a token was sampled.
        options: of the framework's function in this package.

    Raises:
        ValueError: the framework is none of these, or the tensors are not ``[B, S]`` of one shape.
    """
    if framework not in _FRAMEWORKS:
        raise ValueError(f"framework must be one of {', '.join(FRAMEWORKS)}, got {framework!r}")
    shapes = [list(x.shape) for x in (logp_trainer, logp_rollout, mask)]
    if mask.ndim != 2 or not shapes[0] == shapes[1] == shapes[2]:
        raise ValueError(
            f"the tensors must be [B, S] of one shape, got {shapes[0]}, {shapes[1]}, {shapes[2]}"
        )
    return _FRAMEWORKS[framework](logp_trainer, logp_rollout, mask.bool(), **options)


__all__ = ["FRAMEWORKS", "aliases"]

"""prime-rl: `src/prime_rl/trainer/rl/{loss,train}.py` and `trainer/utils.py` at 559b447 (2026-08-21)."""

from __future__ import annotations

import math

from torch import Tensor

from rl_attn_plugin.monitor.aliases.parts import Numbers


def prime_rl(trainer: Tensor, rollout: Tensor, mask: Tensor) -> Numbers:
    """``mismatch_kl/all/*`` over all tokens of all ranks, and the Prometheus gauge. What depends on advantages
    (``masked_mismatch_kl`` and its kin) is not here.

    Args:
        trainer: ``logprobs`` ``[B, S]``.
        rollout: ``inference_logprobs`` ``[B, S]``.
        mask: bool, ``loss_mask`` ``[B, S]``.
    """
    d = (trainer - rollout)[mask]
    k3 = d.exp() - d - 1
    names = ("mean", "median", "std", "min", "max")
    if k3.numel():
        spread = float(k3.std()) if k3.numel() > 1 else math.nan
        values = [float(k3.mean()), float(k3.median()), spread, float(k3.min()), float(k3.max())]
        gauge = values[0]
    else:
        values, gauge = [math.nan] * len(names), 0.0  # the gauge of a run without tokens looks perfect
    found = {f"mismatch_kl/all/{name}": value for name, value in zip(names, values, strict=True)}
    return found | {"trainer_mismatch_kl": gauge}

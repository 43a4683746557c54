"""Megatron-LM RL: `megatron/rl/rl_utils.py` at d98e8a6 (2026-08-22)."""

from __future__ import annotations

from torch import Tensor

from rl_attn_plugin.monitor.aliases.parts import Numbers


def megatron_rl(trainer: Tensor, rollout: Tensor, mask: Tensor, *, returned: Tensor | None = None) -> Numbers:
    """``{min,max,mean}_piold_to_inf_prob``, ``.._inf_train_prob_abs_diff`` and ``.._inf_prob``; nothing without tokens.

    Args:
        trainer: ``old_logprobs`` ``[B, S]``.
        rollout: inference log-probs ``[B, S]``.
        mask: bool, generated tokens ``[B, S]``.
        returned: bool ``[B, S]``, tokens for which the engine returned a log-prob; for the others Megatron takes the
            trainer's own. None: for all.
    """
    if not mask.any():
        return {}
    if returned is not None:
        rollout = rollout.where(returned, trainer)
    columns = {
        "piold_to_inf_prob": (trainer - rollout).exp()[mask],
        "inf_train_prob_abs_diff": (trainer.exp() - rollout.exp()).abs()[mask],
        "inf_prob": rollout.exp()[mask],
    }
    found: Numbers = {}
    for name, x in columns.items():
        found |= {
            f"min_{name}": float(x.min()),
            f"max_{name}": float(x.max()),
            f"mean_{name}": float(x.mean()),
        }
    return found

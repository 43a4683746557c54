"""NeMo-RL: `nemo_rl/algorithms/loss/loss_functions.py` and `grpo.py` at 7ea279a (2026-08-22)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_attn_plugin.monitor.aliases.parts import Numbers


def nemo_rl(trainer: Tensor, rollout: Tensor, mask: Tensor) -> Numbers:
    """Micro-batches add up exactly here: every sum is divided by the tokens of the global batch.

    Args:
        trainer: ``prev_logprobs`` ``[B, S]``, without the first column, which NeMo-RL cuts off.
        rollout: ``generation_logprobs`` likewise.
        mask: bool, token and sample mask likewise.
    """
    kept = mask.to(trainer.dtype)
    total = kept.sum() + 1e-8

    def mean(x: Tensor) -> float:
        return float((x * kept).sum() / total)  # a NaN that is masked out comes through

    d = trainer - rollout
    mixture = torch.log(0.5 * trainer.exp() + 0.5 * rollout.exp())
    error = torch.exp(d.abs() * kept)
    tokens = kept.sum(-1)
    # a row that is masked out as a whole has no error
    by_row = ((error * kept).sum(-1) / tokens.clamp(min=1))[tokens > 0]
    found = {
        "token_mult_prob_error": mean(error),
        "gen_kl_error": mean(_k3(d)),
        "policy_kl_error": mean(_k3(-d)),
        "js_divergence_error": mean(0.5 * _k3(trainer - mixture) + 0.5 * _k3(rollout - mixture)),
        "sampling_importance_ratio": mean(d.exp()),
    }
    for name, value in (("max", by_row.max), ("mean", by_row.mean), ("min", by_row.min)):
        found[f"{name}_seq_mult_prob_error"] = float(value()) if by_row.numel() else 0.0
    return found


def _k3(x: Tensor) -> Tensor:
    return x.exp() - 1 - x

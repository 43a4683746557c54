"""OpenRLHF: `openrlhf/models/loss.py` at 3c3be62 (2026-08-13)."""

from __future__ import annotations

from torch import Tensor

from rl_attn_plugin.monitor.aliases.parts import Numbers, mean_of_parts, multiplied_mean


def openrlhf(
    trainer: Tensor, rollout: Tensor, mask: Tensor, *, micro_batch_rows: int | None = None
) -> Numbers:
    """``vllm_kl``: signed, rollout minus trainer, and a mean over micro-batches.

    Args:
        trainer: ``old_log_probs`` ``[B, S]``.
        rollout: ``rollout_log_probs`` ``[B, S]``; OpenRLHF writes 0 where the engine gave none.
        mask: bool, ``action_mask`` ``[B, S]``.
        micro_batch_rows: rows a micro-batch.
    """

    def one(t: Tensor, r: Tensor, m: Tensor) -> Numbers:
        return {"vllm_kl": float(multiplied_mean(r - t, m))}

    return mean_of_parts(one, micro_batch_rows, trainer, rollout, mask)

"""slime: `slime/backends/megatron_utils/{loss,cp_utils}.py` at 624b824 (2026-08-21)."""

from __future__ import annotations

from torch import Tensor

from rl_attn_plugin.monitor.aliases.parts import Numbers


def slime(
    trainer: Tensor,
    rollout: Tensor,
    mask: Tensor,
    *,
    tis_clip: float = 2.0,
    tis_clip_low: float = 0.0,
    icepop: bool = False,
    calculate_per_token_loss: bool = False,
) -> Numbers:
    """``train/train_rollout_logprob_abs_diff`` and what the TIS path adds. Micro-batches add up exactly here.

    Args:
        trainer: training log-probs, one sample a row ``[B, S]``.
        rollout: ``rollout_log_probs`` ``[B, S]``.
        mask: bool, ``loss_masks`` ``[B, S]``.
        tis_clip: ``--tis-clip``.
        tis_clip_low: ``--tis-clip-low``.
        icepop: whether weights outside the bounds are zeroed instead of clamped.
        calculate_per_token_loss: ``--calculate-per-token-loss``: a mean over tokens instead of one of samples' means.
    """
    tokens = mask.sum(-1).clamp(min=1)  # a sample without tokens counts, as 0

    def mean(x: Tensor) -> float:
        sums = (x * mask).sum(-1)
        return float(sums.sum() / tokens.sum() if calculate_per_token_loss else (sums / tokens).mean())

    ratio = (trainer - rollout).exp()
    clamped = ratio.clamp(tis_clip_low, tis_clip)
    weight = ratio.where((ratio >= tis_clip_low) & (ratio <= tis_clip), 0.0) if icepop else clamped
    return {
        "train/train_rollout_logprob_abs_diff": mean((trainer - rollout).abs()),
        "train/tis": mean(ratio),
        "train/tis_clipfrac": mean((weight != ratio).to(ratio.dtype)),
        "train/tis_abs": mean((ratio - 1).abs()),
    }

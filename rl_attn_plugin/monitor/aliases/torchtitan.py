"""torchtitan: `torchtitan/experiments/rl/losses/dapo.py` at b5bcd76 (2026-08-21)."""

from __future__ import annotations

from torch import Tensor

from rl_attn_plugin.monitor.aliases.parts import Numbers

_MAX_LOG_RATIO = 10.0


def torchtitan(
    trainer: Tensor,
    rollout: Tensor,
    mask: Tensor,
    *,
    ratio_clip_low: float = 0.2,
    ratio_clip_high: float = 0.2,
) -> Numbers:
    """``bit_wise/*`` and the ratio of the loss. Micro-batches and ranks add up exactly here.

    Args:
        trainer: of the current policy ``[B, S]``.
        rollout: ``generator_logprobs`` ``[B, S]``; tokens where it is not finite are dropped without a count.
        mask: bool, ``loss_mask`` ``[B, S]``.
        ratio_clip_low: of the loss.
        ratio_clip_high: of the loss.
    """
    kept = mask & rollout.isfinite()
    total = max(int(kept.sum()), 1)
    d = (trainer - rollout).where(kept, 0.0)
    ratio = d.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - ratio_clip_low, 1 + ratio_clip_high)
    return {
        "bit_wise/logprob_diff/mean": float(d.float().sum() / total),
        "bit_wise/logprob_diff/max": float(d.abs().max()) if d.numel() else 0.0,
        "bit_wise/ratio_tokens_different/mean": float(((d.abs() > 1e-6) & kept).sum() / total),
        "loss/ratio_mean": float((ratio * kept).sum() / total),
        "loss/ratio_clipped_frac": float((((ratio - clipped).abs() > 1e-6) & kept).sum() / total),
    }

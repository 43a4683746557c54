"""TRL: `trl/trainer/grpo_trainer.py` at f2cd577 (2026-07-24)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rl_attn_plugin.monitor.aliases.parts import Numbers, parts

Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def trl(
    trainer: Tensor,
    rollout: Tensor,
    mask: Tensor,
    *,
    mode: Mode = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
    rank_rows: int | None = None,
) -> Numbers:
    """``sampling/sampling_logp_difference/*`` and ``sampling/importance_sampling_ratio/*``.

    Args:
        trainer: ``old_per_token_logps`` ``[B, S]``.
        rollout: ``sampling_per_token_logps`` ``[B, S]``.
        mask: bool, completion and tool mask ``[B, S]``.
        mode: ``vllm_importance_sampling_mode``.
        clip_min: ``vllm_importance_sampling_clip_min``.
        clip_max: ``vllm_importance_sampling_clip_max``.
        rank_rows: rows a rank has; None for one rank.
    """
    found = [_rank(t, r, m, mode, clip_min, clip_max) for t, r, m in parts(rank_rows, trainer, rollout, mask)]

    def column(name: str) -> list[float]:
        return [numbers[name] for numbers in found]

    difference, ratio = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
    return {
        f"{difference}/mean": sum(column("difference_mean")) / len(found),
        f"{difference}/max": max(column("difference_max")),
        f"{ratio}/min": min(column("ratio_min")),
        f"{ratio}/mean": sum(column("ratio_mean")) / len(found),
        f"{ratio}/max": max(column("ratio_max")),
    }


def _rank(
    trainer: Tensor, rollout: Tensor, mask: Tensor, mode: Mode, clip_min: float | None, clip_max: float | None
) -> Numbers:
    log_ratio = (trainer - rollout) * mask
    by_sequence = mode.startswith("sequence")
    ratio = (log_ratio.sum(-1, keepdim=True) if by_sequence else log_ratio).exp()
    low, high = (
        (-float("inf") if clip_min is None else clip_min),
        (float("inf") if clip_max is None else clip_max),
    )
    ratio = (
        ratio.clamp(low, high)
        if mode.endswith("truncate")
        else ratio.masked_fill((ratio < low) | (ratio > high), 0)
    )
    ratio = ratio.flatten() if by_sequence else ratio[mask]
    apart = (trainer - rollout).abs()[mask]
    return {
        "difference_mean": float(apart.mean()) if apart.numel() else 0.0,
        "difference_max": float(apart.max()) if apart.numel() else 0.0,
        "ratio_min": float(ratio.min()) if ratio.numel() else 0.0,
        "ratio_mean": float(ratio.mean()) if ratio.numel() else 0.0,
        "ratio_max": float(ratio.max()) if ratio.numel() else 0.0,
    }

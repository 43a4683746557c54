"""SkyRL: `skyrl/train/trainer.py`, `workers/worker_utils.py` and `utils/off_policy_correction_utils.py` at a956457
(2026-08-21)."""

from __future__ import annotations

import math

from torch import Tensor

from rl_attn_plugin.monitor.aliases.parts import Numbers, mean_of_parts, parts

_CLIP = 20.0


def skyrl(trainer: Tensor, rollout: Tensor, mask: Tensor, *, micro_batch_rows: int | None = None) -> Numbers:
    """``rollout_train_logprobs_abs_diff_*`` over the batch, the others as means over micro-batches.

    Args:
        trainer: ``action_log_probs`` ``[B, S]``.
        rollout: ``rollout_logprobs`` ``[B, S]``.
        mask: bool, ``loss_mask`` ``[B, S]``.
        micro_batch_rows: rows a micro-batch.
    """
    found: Numbers = {}
    apart = (rollout[mask] - trainer[mask]).abs()
    if apart.numel():
        prefix = "policy/rollout_train_logprobs_abs_diff"
        found = {
            f"{prefix}_max": float(apart.max()),
            f"{prefix}_min": float(apart.min()),
            f"{prefix}_mean": float(apart.mean()),
            f"{prefix}_std": float(apart.std()) if apart.numel() > 1 else math.nan,
        }
    averaged = mean_of_parts(_micro_batch, micro_batch_rows, trainer, rollout, mask)
    square = averaged.pop("square")
    prefix = "policy/minibatch_rollout_logprobs_abs_diff"
    mean = averaged.pop("mean")
    extremes = [_extremes(*part) for part in parts(micro_batch_rows, trainer, rollout, mask)]
    return found | {
        f"{prefix}_mean": mean,
        f"{prefix}_std": math.sqrt(max(0.0, square - mean * mean)),
        f"{prefix}_max": max(high for _, high in extremes),
        f"{prefix}_min": min(low for low, _ in extremes),
        "is_ratio_mean": averaged["ratio_mean"],
        "is_ratio_std": averaged["ratio_std"],
        "is_ratio_max": max(float(r.max()) for r in _ratios(micro_batch_rows, trainer, rollout, mask)),
        "is_ratio_min": min(float(r.min()) for r in _ratios(micro_batch_rows, trainer, rollout, mask)),
    }


def _micro_batch(trainer: Tensor, rollout: Tensor, mask: Tensor) -> Numbers:
    apart = (trainer - rollout).abs()
    ratio = _ratio(trainer, rollout)
    return {
        "mean": _mean(apart, mask),
        "square": _mean(apart.square(), mask),
        "ratio_mean": _mean(ratio, mask),
        "ratio_std": float((ratio * mask).std()) if ratio.numel() > 1 else math.nan,  # padding counts as 0
    }


def _extremes(trainer: Tensor, rollout: Tensor, mask: Tensor) -> tuple[float, float]:
    apart = (trainer - rollout).abs() * mask  # padding counts as 0
    return float(apart.min()), float(apart.max())


def _ratios(rows: int | None, trainer: Tensor, rollout: Tensor, mask: Tensor) -> list[Tensor]:
    return [_ratio(t, r) * m for t, r, m in parts(rows, trainer, rollout, mask)]


def _ratio(trainer: Tensor, rollout: Tensor) -> Tensor:
    return (trainer - rollout).float().clamp(-_CLIP, _CLIP).exp().to(trainer.dtype)


def _mean(x: Tensor, mask: Tensor) -> float:
    return float((x * mask).sum() / mask.sum().clamp(min=1))

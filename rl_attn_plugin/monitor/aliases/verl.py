"""verl: `verl/utils/debug/metrics.py` and `verl/trainer/ppo/rollout_corr_helper.py` at 1dda039b (2026-08-22)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from rl_attn_plugin.monitor.aliases.parts import Numbers, mean_of_parts
from rl_attn_plugin.monitor.aliases.verl_rejection import SAFETY_BOUND, Bounds, rejection, verl_mean


def verl(
    trainer: Tensor,
    rollout: Tensor,
    mask: Tensor,
    *,
    rollout_is: Literal["token", "sequence"] | None = None,
    threshold: float = 2.0,
    lower: float | None = None,
    batch_normalize: bool = False,
    rollout_rs: Mapping[str, Bounds] | None = None,
    micro_batch_rows: int | None = None,
) -> Numbers:
    """``training/rollout_probs_diff_*`` and ``rollout_corr/*``.

    Args:
        trainer: ``old_log_probs`` ``[B, S]``.
        rollout: ``rollout_log_probs`` ``[B, S]``.
        mask: bool, ``response_mask`` ``[B, S]``.
        rollout_is: level of the weights; None leaves ``rollout_is_*`` out.
        threshold: upper bound of the weights.
        lower: lower bound; given, weights outside are zeroed (IcePop) instead of truncated.
        batch_normalize: whether the weights are divided by their mean.
        rollout_rs: rejection options and their bounds; None leaves ``rollout_rs_*`` out.
        micro_batch_rows: rows a micro-batch, when ``rollout_corr`` is computed in the actor and averaged over them.
    """
    found = _probabilities(trainer, rollout, mask)
    if not mask.any():
        return found

    def corrected(t: Tensor, r: Tensor, m: Tensor) -> Numbers:
        if not m.any():
            return {}
        numbers = _off_policy(t, r, m)
        if rollout_is is not None:
            numbers |= _weights(t - r, m, rollout_is, threshold, lower, batch_normalize)
        if rollout_rs is not None:
            numbers |= rejection(t - r, m, rollout_rs)
        return numbers

    averaged = mean_of_parts(corrected, micro_batch_rows, trainer, rollout, mask)
    return found | {f"rollout_corr/{key}": value for key, value in averaged.items()}


def _probabilities(trainer: Tensor, rollout: Tensor, mask: Tensor) -> Numbers:
    apart = (trainer.exp() - rollout.exp()).abs()[mask]
    names = ("max", "mean", "std")
    if not apart.numel():
        values, pearson = [math.nan] * 3, math.nan
    else:
        values = [
            float(apart.max()),
            float(apart.mean()),
            float(apart.std()) if apart.numel() > 1 else math.nan,
        ]
        pair = torch.stack([trainer.exp()[mask], rollout.exp()[mask]])
        pearson = float(torch.corrcoef(pair)[0, 1]) if apart.numel() > 1 else math.nan
    return {
        "training/rollout_probs_diff_valid": float(bool(apart.numel())),
        **{f"training/rollout_probs_diff_{name}": value for name, value in zip(names, values, strict=True)},
        "training/rollout_actor_probs_pearson_corr": pearson,
    }


def _off_policy(trainer: Tensor, rollout: Tensor, mask: Tensor) -> Numbers:
    trainer_mean, rollout_mean = verl_mean(trainer, mask, -1), verl_mean(rollout, mask, -1)
    difference = rollout_mean - trainer_mean
    log_ratio = trainer - rollout
    sums = log_ratio.where(mask, 0.0).sum(-1).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    squares = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp().square()
    found = {
        "training_ppl": (-trainer_mean).exp().mean(),
        "training_log_ppl": (-trainer_mean).mean(),
        "kl": verl_mean(rollout - trainer, mask),
        "k3_kl": verl_mean(log_ratio.exp() - log_ratio - 1, mask),
        "rollout_ppl": (-rollout_mean).exp().mean(),
        "rollout_log_ppl": (-rollout_mean).mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": verl_mean(squares, mask) - 1,
        "chi2_seq": (2 * sums).exp().mean() - 1,
    }
    return {key: float(value) for key, value in found.items()}


def _weights(
    log_ratio: Tensor, mask: Tensor, level: str, upper: float, lower: float | None, normalize: bool
) -> Numbers:
    whole = log_ratio.where(mask, 0.0).sum(-1, keepdim=True)
    raw_log = whole if level == "sequence" else log_ratio
    # verl multiplies with the mask here
    raw = raw_log.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp().expand_as(log_ratio) * mask
    weights = raw.clamp(max=upper) if lower is None else raw.where((raw >= lower) & (raw <= upper), 0.0)
    low = 1 / upper if lower is None else lower
    if level == "sequence":
        largest, smallest = raw_log.max().clamp(max=SAFETY_BOUND).exp(), raw_log.min().exp()
        high_share = (raw_log > math.log(upper)).float().mean()
        low_share = (raw_log < math.log(low)).float().mean()
    else:
        # of the truncated weights: never above the threshold
        largest, smallest = weights[mask].max(), weights[mask].min()
        high_share, low_share = (
            verl_mean((raw > upper).float(), mask),
            verl_mean((raw < low).float(), mask),
        )
    bounded = weights.clamp(0.0, upper)
    mean = verl_mean(bounded, mask)
    spread = (verl_mean(bounded.square(), mask) - mean.square()).clamp(min=0).sqrt()
    by_row, raw_by_row = verl_mean(weights, mask, -1), verl_mean(raw, mask, -1)
    found = {
        "rollout_is_mean": verl_mean(weights, mask),
        "rollout_is_max": largest,
        "rollout_is_min": smallest,
        "rollout_is_ratio_fraction_high": high_share,
        "rollout_is_ratio_fraction_low": low_share,
        "rollout_is_std": spread if int(mask.sum()) > 1 else mean.new_zeros(()),
        "rollout_is_eff_sample_size": 1 / verl_mean((bounded / (mean + 1e-8)).square(), mask),
        "rollout_is_seq_mean": by_row.mean(),
        "rollout_is_seq_std": by_row.std() if by_row.numel() > 1 else mean.new_zeros(()),
        "rollout_is_seq_max": by_row.max(),
        "rollout_is_seq_min": by_row.min(),
        "rollout_is_seq_max_deviation": (by_row - 1).abs().max(),
        "rollout_is_seq_fraction_high": (raw_by_row > upper).float().mean(),
        "rollout_is_seq_fraction_low": (raw_by_row < low).float().mean(),
    }
    if lower is not None:
        found["rollout_is_oob_ratio"] = verl_mean(((raw < lower) | (raw > upper)).float(), mask)
    if normalize:
        factor = verl_mean(weights, mask) if level == "token" else by_row[mask.any(-1)].mean()
        found["rollout_is_batch_norm_factor"] = factor if float(factor) > 1e-8 else torch.ones(())
    return {key: float(value) for key, value in found.items()}

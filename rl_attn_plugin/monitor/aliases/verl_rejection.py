"""verl's rejection statistics: `compute_rollout_rejection_mask` of `rollout_corr_helper.py` at 1dda039b (2026-08-22)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_attn_plugin.monitor.aliases.parts import Numbers

SAFETY_BOUND = 20.0
Bounds = float | tuple[float, float]


def verl_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """verl's masked mean with an integer mask, whose count it adds 1e-8 to in float32."""
    return x.where(mask, 0.0).sum(dim) / (mask.sum(dim) + 1e-8)


def rejection(log_ratio: Tensor, mask: Tensor, rules: Mapping[str, Bounds]) -> Numbers:
    """``rollout_rs_*``.

    Args:
        log_ratio: trainer minus rollout ``[B, S]``.
        mask: bool ``[B, S]``.
        rules: option (``token_k1``, ``seq_mean_k3``, ..) and its bound: for k1 two ratios, or the upper one alone, of
            the inverse ratio rollout over trainer; for k2 and k3 the largest value.
    """
    clamped = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    estimators = {"k1": -clamped, "k2": 0.5 * clamped**2, "k3": clamped.exp() - 1 - clamped}
    kept_by_all = torch.ones_like(mask)
    found: Numbers = {}
    for option, bounds in rules.items():
        how, _, estimator = option.rpartition("_")
        high, low = _bounds(estimator, bounds)
        stat = estimators[estimator]
        by_row: Tensor | None = None
        if how != "token":
            by_row = _of_rows(how, stat, mask)
            stat = by_row[:, None].expand_as(mask)
        kept = (stat <= high) if low is None else (stat >= low) & (stat <= high)
        kept_by_all &= kept
        numbers = _statistics(stat, mask, by_row, high, low)
        rows = mask.any(-1)
        rejected = (~kept & mask).any(-1)
        numbers["masked_fraction"] = verl_mean((~kept).to(stat.dtype), mask)
        numbers["seq_masked_fraction"] = (rejected & rows).sum() / rows.sum()
        found |= {f"rollout_rs_{option}_{key}": float(value) for key, value in numbers.items()}
    found["rollout_rs_masked_fraction"] = float(verl_mean((~kept_by_all).to(log_ratio.dtype), mask))
    found["rollout_rs_seq_masked_fraction"] = float((~kept_by_all & mask).any(-1).float().mean())
    return found


def _bounds(estimator: str, bounds: Bounds) -> tuple[float, float | None]:
    if estimator != "k1":
        if isinstance(bounds, tuple):
            raise ValueError(f"the bound of {estimator} must be one number, got {bounds}")
        return bounds, None
    low, high = bounds if isinstance(bounds, tuple) else (1 / bounds, bounds)
    return math.log(high), math.log(low)


def _of_rows(how: str, stat: Tensor, mask: Tensor) -> Tensor:
    if how == "seq_sum":
        return stat.where(mask, 0.0).sum(-1)
    if how == "seq_mean":
        return verl_mean(stat, mask, -1)
    if how == "seq_max":
        return stat.where(mask, float("-inf")).amax(-1).where(mask.any(-1), 0.0)
    raise ValueError(f"the option must begin with token, seq_sum, seq_mean or seq_max, got {how!r}")


def _statistics(
    stat: Tensor, mask: Tensor, by_row: Tensor | None, high: float, low: float | None
) -> dict[str, Tensor]:
    rows = (verl_mean(stat, mask, -1) if by_row is None else by_row)[mask.any(-1)]
    values = stat[mask] if by_row is None else rows
    none = stat.new_zeros(())
    bounded = stat.clamp(0.0 if low is None else low, high)
    mean = verl_mean(bounded, mask)
    spread = (verl_mean(bounded.square(), mask) - mean.square()).clamp(min=0).sqrt()

    def share(x: Tensor) -> Tensor:
        return verl_mean(x.float(), mask) if by_row is None else x[mask.any(-1), 0].float().mean()

    found = {
        "mean": verl_mean(stat, mask),
        "max": values.max(),
        "min": values.min(),
        "fraction_high": share(stat > high),
        "fraction_low": none if low is None else share(stat < low),
        "std": spread if int(mask.sum()) > 1 else none,
        "seq_mean": rows.mean(),
        "seq_std": rows.std() if rows.numel() > 1 else none,
        "seq_max": rows.max(),
        "seq_min": rows.min(),
        "seq_max_deviation": rows.abs().max(),
        "seq_fraction_high": (rows > high).float().mean(),
    }
    if low is not None:
        found["seq_fraction_low"] = (rows < low).float().mean()
    return found

"""Log-ratios of whole sequences and of single turns."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rl_attn_plugin.monitor.settings import Settings
from rl_attn_plugin.monitor.state import split
from rl_attn_plugin.monitor.tokens import Tokens
from rl_attn_plugin.monitor.validity import count


class SegmentStats(NamedTuple):
    """One update's share, scalars by the name that follows the segment's.

    Attributes:
        counts: int64.
        sums: fp64.
        maxima: fp64; the log-ratio's own and its negative's are under ``""`` and ``"-"``.
        scaled: fp64 ``[2]``, sums of exp(L - m) and exp(2 (L - m)) with the log-ratios L and m their maximum.
    """

    counts: dict[str, Tensor]
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    scaled: Tensor


def turns(tokens: Tokens) -> Tensor | None:
    """The turn of each active token, from 0: it changes with the sequence and with the label of group ``turn``."""
    label = tokens.groups.get("turn")
    if label is None or tokens.first is None or tokens.previous is None:
        return None
    changes = (
        tokens.active
        & (tokens.previous >= 0)
        & (label != label.index_select(0, tokens.previous.clamp(min=0)))
    )
    return (tokens.first | changes).cumsum(0).sub_(1).clamp_(min=0)


def segment_stats(
    tokens: Tokens, segment: Tensor, segments: int, size: Tensor, prob_apart: Tensor, settings: Settings
) -> SegmentStats:
    """Statistics over segments: the log-ratio L is the sum of dlogp, its mean g divides by the segment's tokens.

    A segment with a token that cannot be compared has no log-ratio; it is counted and left out.

    Args:
        tokens: of the update.
        segment: int64 ``[T]``, from 0.
        segments: more than any segment's index.
        size: fp64 ``[T]``, abs(dlogp), 0 where not compared.
        prob_apart: fp64 ``[T]``, abs difference of probabilities, 0 where not compared.
        settings: of the monitor.
    """

    def add(values: Tensor) -> Tensor:
        return torch.zeros(segments, dtype=values.dtype, device=values.device).scatter_add_(
            0, segment, values
        )

    active, compared = add(tokens.active.long()), add(tokens.compared.long())
    far = add((prob_apart > 0.5).long()) > 0
    whole = (active > 0) & (compared == active)
    ratio, absolute = add(tokens.d).where(whole, 0.0), add(size).where(whole, 0.0)
    tokens_in = active.clamp(min=1)
    mean, absolute_mean = ratio / tokens_in, absolute / tokens_in
    low, high = (math.log(bound) for bound in settings.clip)
    above, below = whole & (ratio > high), whole & (ratio < low)
    inside = whole & ~above & ~below
    none = float("-inf")
    largest = ratio.where(whole, none).amax()
    scaled = (ratio - largest).where(whole, none).exp()
    (ratio_grid, ratio_rest), (mean_grid, mean_rest) = split(ratio), split(mean)
    return SegmentStats(
        counts={
            "count": count(whole),
            "incomplete": count((active > 0) & ~whole),
            "prob_over_half": count(far & whole),
            "clip_above": count(above),
            "clip_below": count(below),
        },
        sums={
            "d": ratio_grid.sum(),
            "d_rest": ratio_rest.sum(),
            "abs": ratio.abs().sum(),
            "mean": mean_grid.sum(),
            "mean_rest": mean_rest.sum(),
            "mean_abs": mean.abs().sum(),
            "abs_mean": absolute_mean.sum(),
            "geometric": mean.exp().where(whole, 0.0).sum(),
            "truncated": ratio.clamp(max=high).exp().where(whole, 0.0).sum(),
            "masked": ratio.where(inside, none).exp().sum(),
        },
        maxima={
            "": largest,
            "-": (-ratio).where(whole, none).amax(),
            "_mean": mean.where(whole, none).amax(),
            "-_mean": (-mean).where(whole, none).amax(),
        },
        scaled=torch.stack([scaled.sum(), (scaled * scaled).sum()]),
    )

"""Where drift comes from: full minus recorded as a sum of three steps, and each step with and without the
plugin's attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_attn_plugin.drift.stats import Floats, difference
from rl_attn_plugin.drift.tokens import Scores

# full - recorded, cut at what lies between: the three signed differences of a token add up to it
STEPS = ("full_minus_chunked", "chunked_minus_decode_replay", "decode_replay_minus_recorded")
TOTAL = "full_minus_recorded"
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Contrast:
    """The same tokens with native and with plugin attention.

    Attributes:
        native_mean_abs: mean abs of the native arm's difference; None without tokens.
        plugin_mean_abs: of the plugin arm's.
        share: 1 - plugin / native: the part of native drift that goes away with native attention, so
            attention's share of it. Negative when the plugin arm drifts more; None when native does not
            drift.
        share_low: lower end of its 95 % interval; None when fewer than two completions carry it.
        share_high: upper end.
    """

    native_mean_abs: float | None
    plugin_mean_abs: float | None
    share: float | None
    share_low: float | None
    share_high: float | None


def total(arm: Scores) -> Floats:
    """Trainer minus recorded of each token."""
    return difference(arm.trainer, arm.paths["recorded"])


def steps(arm: Scores) -> dict[str, Floats]:
    """The telescoped differences of each token; they add up to trainer minus recorded."""
    chunked, replay, recorded = (arm.paths[p] for p in ("chunked_prefill", "decode_replay", "recorded"))
    values = (difference(arm.trainer, chunked), difference(chunked, replay), difference(replay, recorded))
    return dict(zip(STEPS, values, strict=True))


def contrast(native: Floats, plugin: Floats, sample: NDArray[np.int64]) -> Contrast:
    """Contrast of two arms' differences of the same tokens.

    The interval resamples whole completions (tokens of one completion are not independent), with a fixed
    seed: same run, same interval.

    Args:
        native: finite differences ``[N]``.
        plugin: finite differences of the same tokens ``[N]``.
        sample: completion of each token ``[N]``.
    """
    if native.size == 0:
        return Contrast(None, None, None, None, None)
    without, with_ = float(np.abs(native).mean()), float(np.abs(plugin).mean())
    if without == 0:
        return Contrast(without, with_, None, None, None)
    _, which = np.unique(sample, return_inverse=True)
    sums = np.stack([np.bincount(which, np.abs(d)).astype(np.float64) for d in (native, plugin)])
    low = high = None
    if sums.shape[1] > 1:
        # of one resample the token counts are the same for both arms: the ratio of sums is that of means
        bottom, top = _resampled_sums(sums)
        usable = bottom > 0
        if usable.any():
            low, high = np.quantile(1 - top[usable] / bottom[usable], (0.025, 0.975)).tolist()
    return Contrast(without, with_, 1 - with_ / without, low, high)


def _resampled_sums(sums: Floats) -> Floats:
    """Sums ``[2, C]`` per completion, added up over C completions drawn with replacement: ``[2, R]``."""
    completions = sums.shape[1]
    generator = np.random.default_rng(0)
    block = max(1, 1_000_000 // completions)  # resamples at once: memory stays small in runs of any size
    found = []
    for start in range(0, _RESAMPLES, block):
        draw = generator.integers(0, completions, (min(block, _RESAMPLES - start), completions))
        found.append(sums[:, draw].sum(-1))
    return np.concatenate(found, axis=1)

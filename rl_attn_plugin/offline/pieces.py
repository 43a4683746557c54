"""What readers hand on: some whole sequences, flat."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

PIECE_TOKENS = 1 << 16
"""Tokens of a piece, about: enough to be fast, few enough for a cache."""

UNKNOWN = -1
"""A token id that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A sequence whose lists disagree in length.

    Attributes:
        step: its step.
        lengths: of the trainer's log-probs, the rollout's, and the mask.
    """

    step: int
    lengths: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Whole sequences, one after another; everything ``[T]``.

    Attributes:
        trainer: fp64, `rl_attn_plugin.monitor.MISSING` where there is none.
        rollout: likewise.
        mask: fp32, 1 where a token was sampled.
        step: int64.
        sequence: int64, equal for the tokens of one sequence; None where sequences are not known.
        token_ids: int64 or None.
        groups: by name, index of the label, or the number of labels where it has none.
        texts: text of token ids that were not seen before.
        refused: sequences that are not among the tokens.
    """

    trainer: NDArray[np.float64]
    rollout: NDArray[np.float64]
    mask: NDArray[np.float32]
    step: NDArray[np.int64]
    sequence: NDArray[np.int64] | None
    token_ids: NDArray[np.int64] | None
    groups: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)

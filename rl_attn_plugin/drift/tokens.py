"""The token table as columns: one row a token, arm and path, sorted and checked for completeness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rl_attn_plugin.drift.stats import Floats

if TYPE_CHECKING:
    import pyarrow as pa

ARMS = ("native", "plugin")
PATHS = ("recorded", "chunked_prefill", "decode_replay")


@dataclass(frozen=True, slots=True)
class Scores:
    """One arm's log-probs of the same tokens, token by token.

    Attributes:
        sample: sample of each token.
        position: its index in prompt and completion.
        token_id: the token.
        text: the token decoded.
        trainer: fp64 log-prob of the trainer's full prefill.
        paths: fp64 log-prob of each rollout path.
    """

    sample: NDArray[np.int64]
    position: NDArray[np.int64]
    token_id: NDArray[np.int64]
    text: list[str]
    trainer: Floats
    paths: dict[str, Floats]

    @property
    def offset(self) -> NDArray[np.int64]:
        """Index of each token in its completion, from 0."""
        if self.sample.size == 0:
            return self.sample
        first = np.full(int(self.sample.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first, self.sample, self.position)
        offset: NDArray[np.int64] = self.position - first[self.sample]
        return offset


def split_arms(table: pa.Table) -> tuple[dict[str, Scores], list[str]]:
    """Scores by arm, and what is missing or contradictory, in words."""
    import pyarrow.compute as pc

    found: dict[str, Scores] = {}
    missing: list[str] = []
    arms = [arm for arm in ARMS if arm in set(table["arm"].unique().to_pylist())]
    for arm in arms:
        rows = table.filter(pc.equal(table["arm"], arm)).sort_by(
            [("path", "ascending"), ("sample", "ascending"), ("position", "ascending")]
        )
        paths = {path: rows.filter(pc.equal(rows["path"], path)) for path in PATHS}
        reference = paths["recorded"]
        keys = [reference[name].to_numpy() for name in ("sample", "position", "token_id")]
        trainer = reference["logp_trainer"].to_numpy().astype(np.float64)
        scores: dict[str, Floats] = {}
        for path, part in paths.items():
            if part.num_rows == 0:
                missing.append(f"arm {arm} has no tokens of path {path}")
                continue
            mine = [part[name].to_numpy() for name in ("sample", "position", "token_id")]
            if not all(np.array_equal(a, b) for a, b in zip(keys, mine, strict=True)):
                missing.append(f"arm {arm}: path {path} does not hold the recorded tokens")
                continue
            full = part["logp_trainer"].to_numpy().astype(np.float64)
            if not np.array_equal(full, trainer, equal_nan=True):
                missing.append(f"arm {arm}: path {path} names other trainer log-probs than recorded")
                continue
            scores[path] = part["logp_rollout"].to_numpy().astype(np.float64)
        sample, position, token_id = (key.astype(np.int64) for key in keys)
        found[arm] = Scores(sample, position, token_id, reference["text"].to_pylist(), trainer, scores)
    return found, missing

"""The token table as columns: one row a token, arm and path, sorted and checked for completeness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rl_attn_plugin.drift.stats import Floats, difference

if TYPE_CHECKING:
    import pyarrow as pa

ARMS = ("native", "plugin")
PATHS = ("recorded", "chunked_prefill", "decode_replay")
COLUMNS = (
    "sample",
    "position",
    "token_id",
    "text",
    "arm",
    "path",
    "logp_trainer",
    "logp_rollout",
    "dlogp",
)


@dataclass(frozen=True, slots=True)
class Scores:
    """One arm's log-probs of the same tokens, sorted by sample and position.

    Attributes:
        sample: sample of each token ``[N]``.
        position: its index in prompt and completion ``[N]``.
        token_id: the token ``[N]``.
        text: the token decoded, N of them.
        trainer: fp64 log-prob of the trainer's full prefill ``[N]``.
        paths: fp64 log-prob of each rollout path ``[N]``.
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
        _, first, which = np.unique(self.sample, return_index=True, return_inverse=True)
        offset: NDArray[np.int64] = self.position - self.position[first][which]
        return offset

    def same_tokens(self, other: Scores) -> bool:
        """Whether both arms scored the same tokens at the same places."""
        return all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("sample", "position", "token_id")
        )


def split_arms(table: pa.Table, expected: Sequence[str] = ARMS) -> tuple[dict[str, Scores], list[str]]:
    """Scores by arm, and what is missing or contradictory, in words. An empty table lacks nothing.

    Args:
        table: one row a token, arm and path.
        expected: arms that must be there; others that are there are read too.

    Raises:
        ValueError: the table lacks a column.
    """
    import pyarrow.compute as pc

    lacking = [name for name in COLUMNS if name not in table.column_names]
    if lacking:
        raise ValueError(
            f"the token table must have columns {', '.join(COLUMNS)}, got no {', '.join(lacking)}"
        )
    if table.num_rows == 0:
        return {}, []
    there = set(table["arm"].unique().to_pylist())
    problems = [f"the run holds no tokens of arm {arm}" for arm in expected if arm not in there]
    found: dict[str, Scores] = {}
    for arm in [arm for arm in expected if arm in there] + sorted(there - set(expected)):
        found[arm] = _read(arm, table.filter(pc.equal(table["arm"], arm)), problems)
    names = list(found)
    for name in names[1:]:
        if not found[name].same_tokens(found[names[0]]):
            problems.append(f"arms {names[0]} and {name} do not hold the same tokens")
    return found, problems


def _read(arm: str, rows: pa.Table, problems: list[str]) -> Scores:
    import pyarrow.compute as pc

    rows = rows.sort_by([("sample", "ascending"), ("position", "ascending")])
    recorded = rows.filter(pc.equal(rows["path"], "recorded"))
    keys = _keys(recorded)
    trainer = _floats(recorded, "logp_trainer")
    paths: dict[str, Floats] = {}
    for path in PATHS:
        part = rows.filter(pc.equal(rows["path"], path))
        if part.num_rows == 0:
            problems.append(f"arm {arm} has no tokens of path {path}")
            continue
        mine, full, values = _keys(part), _floats(part, "logp_trainer"), _floats(part, "logp_rollout")
        sample, position, _ = mine
        if ((sample[1:] == sample[:-1]) & (position[1:] == position[:-1])).any():
            problems.append(f"arm {arm}: path {path} holds a token twice")
            continue
        if not all(np.array_equal(a, b) for a, b in zip(keys, mine, strict=True)):
            problems.append(f"arm {arm}: path {path} does not hold the recorded tokens")
            continue
        if not np.array_equal(full, trainer, equal_nan=True):
            problems.append(f"arm {arm}: path {path} names other trainer log-probs than recorded")
            continue
        d = difference(full, values)
        wrong = int((np.isfinite(d) & (d != _floats(part, "dlogp"))).sum())
        if wrong:
            problems.append(f"arm {arm}: path {path} has {wrong} dlogp that are not trainer minus rollout")
        paths[path] = values
    sample, position, token_id = keys
    return Scores(sample, position, token_id, recorded["text"].to_pylist(), trainer, paths)


def _keys(rows: pa.Table) -> list[NDArray[np.int64]]:
    return [rows[name].to_numpy().astype(np.int64) for name in ("sample", "position", "token_id")]


def _floats(rows: pa.Table, name: str) -> Floats:
    # a null is not a number either
    return np.asarray(rows[name].to_numpy(), np.float64)

"""The tokens with the largest drift, with the text around them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_attn_plugin.drift.telescope import steps, total
from rl_attn_plugin.drift.tokens import Scores

_BEFORE = 24  # completion tokens shown before a worst token
_AFTER = 12


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A token with a large abs(dlogp), trainer against recorded, in the arm under test.

    Attributes:
        sample: its sample.
        position: index in prompt and completion.
        offset: index in the completion.
        token_id: the token.
        text: the token decoded.
        before: completion text right before it.
        after: completion text right after it.
        logp_trainer: of the arm under test.
        logp_rollout: recorded.
        dlogp: their difference.
        other_dlogp: the same token in the other arms, by name; None where it is not valid there.
        steps: the signed steps of this token.
    """

    sample: int
    position: int
    offset: int
    token_id: int
    text: str
    before: str
    after: str
    logp_trainer: float
    logp_rollout: float
    dlogp: float
    other_dlogp: dict[str, float | None]
    steps: dict[str, float]


def worst_tokens(
    arm: Scores,
    rows: NDArray[np.bool_],
    others: dict[str, tuple[Scores, NDArray[np.bool_]]],
    count: int = 20,
) -> list[WorstToken]:
    """The tokens with the largest abs(dlogp), largest first, ties in order of the table.

    Args:
        arm: the arm under test.
        rows: its valid rows.
        others: other arms holding the same tokens, with their valid rows.
        count: how many at most.
    """
    d, by_step = total(arm), steps(arm)
    elsewhere = {name: (total(other), valid) for name, (other, valid) in others.items()}
    ranked = np.flatnonzero(rows)
    ranked = ranked[np.argsort(-np.abs(d[ranked]), kind="stable")][:count]
    offset, found = arm.offset, []
    for row in ranked.tolist():
        # rows are sorted by sample and position
        start = int(np.searchsorted(arm.sample, arm.sample[row], "left"))
        stop = int(np.searchsorted(arm.sample, arm.sample[row], "right"))
        found.append(
            WorstToken(
                sample=int(arm.sample[row]),
                position=int(arm.position[row]),
                offset=int(offset[row]),
                token_id=int(arm.token_id[row]),
                text=arm.text[row],
                before="".join(arm.text[max(start, row - _BEFORE) : row]),
                after="".join(arm.text[row + 1 : min(stop, row + 1 + _AFTER)]),
                logp_trainer=float(arm.trainer[row]),
                logp_rollout=float(arm.paths["recorded"][row]),
                dlogp=float(d[row]),
                other_dlogp={
                    name: float(values[row]) if valid[row] else None
                    for name, (values, valid) in elsewhere.items()
                },
                steps={name: float(values[row]) for name, values in by_step.items()},
            )
        )
    return found

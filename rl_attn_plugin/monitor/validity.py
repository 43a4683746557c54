"""Which values are log-probs. What is none is counted under its name and enters no other number."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MISSING = -32768.0
"""Stands for a log-prob that the engine did not return, where a tensor must hold something. Exact in bf16, fp16
and fp32, so no cast turns it into something else."""

SENTINEL_FLOOR = -9000.0
"""No sampled token is that unlikely: what lies below is a stand-in, such as -9999 (-9984 after a cast to bf16, -10000
after one to fp16) or the lowest float."""

ZERO_FILL = 0.125
"""An exact 0 where the other side is below -0.125 nats is a fill. A probability that rounds to 1 is an honest 0,
and on the other side rounding moves it by at most one bf16 step of logits between 16 and 32, which is 0.125."""

KINDS = ("nan", "inf", "missing", "sentinel", "positive", "zero_fill")
"""In order of precedence: a value is counted once."""

SIDES = ("trainer", "rollout")


class Validity(NamedTuple):
    """Which tokens can be compared.

    Attributes:
        compared: bool ``[T]``: active, and both sides are log-probs.
        invalid: int64 scalars by ``<side>_<kind>``: active tokens whose value on that side is none.
    """

    compared: Tensor
    invalid: dict[str, Tensor]


def judge_values(
    trainer: Tensor, rollout: Tensor, active: Tensor, sentinels: tuple[float, ...] = ()
) -> Validity:
    """Validity of active tokens; what stands elsewhere is not looked at.

    Args:
        trainer: float ``[T]``, as it was handed over: a sentinel is looked for in the same rounding.
        rollout: likewise.
        active: bool ``[T]``.
        sentinels: further values that mean no log-prob.
    """
    sides = (trainer, rollout)
    # A fill is only told from a certain token by the other side, so that side must be a log-prob itself.
    regular = [(x <= 0) & (x >= SENTINEL_FLOOR) for x in sides]
    for x, good in zip(sides, regular, strict=True):
        for value in sentinels:
            good &= x != value
    compared = active.clone()
    invalid: dict[str, Tensor] = {}
    none = dict.fromkeys(KINDS, torch.zeros((), dtype=torch.int64, device=active.device))
    for side, x, other, good, other_good in zip(
        SIDES, sides, sides[::-1], regular, regular[::-1], strict=True
    ):
        fill = active & good & other_good & (x == 0) & (other < -ZERO_FILL)
        wrong = active & ~good
        kinds = (
            none
            | (_kinds(x, wrong) if not reads_freely(wrong) or bool(wrong.any()) else {})
            | {"zero_fill": count(fill)}
        )
        invalid.update({f"{side}_{kind}": kinds[kind] for kind in KINDS})
        compared &= good & ~fill
    return Validity(compared, invalid)


def _kinds(x: Tensor, wrong: Tensor) -> dict[str, Tensor]:
    """Wrong values by kind, each counted once."""
    inf = wrong & x.isinf()
    found = {
        "nan": count(wrong & (x != x)),
        "inf": count(inf),
        "missing": count(wrong & (x == MISSING)),
        "positive": count(wrong & (x > 0) & ~inf),
    }
    return found | {"sentinel": count(wrong) - torch.stack(list(found.values())).sum()}


def reads_freely(x: Tensor) -> bool:
    """Whether values can be looked at without waiting: on a CPU. What is done then saves work and changes no number."""
    return x.device.type == "cpu"


def count(rows: Tensor) -> Tensor:
    """How many are True, as an int64 scalar. Faster than a sum on CPUs."""
    return torch.count_nonzero(rows)


def missing_like(like: Tensor) -> Tensor:
    """What stands for a side that is not there at all."""
    return torch.full_like(like, MISSING, dtype=torch.float32)

"""Statistics of ``reference - candidate``, on the device the tensors are on.

The sign is that of dlogp: the reference is the trainer's way, the candidate a rollout's.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorDrift:
    """How far a tensor is from its reference, with d = reference - candidate. All None without an element.

    Attributes:
        max_abs: largest abs(d).
        mean_abs: mean abs(d).
        mean: mean d.
        p95_abs: 95 % quantile of abs(d), by linear interpolation between order statistics.
        p99_abs: 99 % quantile.
        active_count: elements compared.
        differing_count: elements that are not equal.
        infinite_count: elements whose difference is no finite number: one side infinite or NaN. They are left out of
            the means and quantiles, and make ``max_abs`` infinite. ``-inf`` against ``-inf`` is 0.
        bit_equal: every element is equal (`torch.equal`).
    """

    max_abs: float | None
    mean_abs: float | None
    mean: float | None
    p95_abs: float | None
    p99_abs: float | None
    active_count: int
    differing_count: int
    infinite_count: int
    bit_equal: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: an infinite ``max_abs`` is the string ``"inf"``."""
        data = asdict(self)
        return data | {"max_abs": "inf" if self.max_abs == math.inf else self.max_abs}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TensorDrift:
        """The inverse of `to_dict`."""
        largest = data["max_abs"]
        return cls(**{**data, "max_abs": math.inf if largest == "inf" else largest})


def tensor_drift(candidate: Tensor, reference: Tensor, active: Tensor | None = None) -> TensorDrift:
    """Statistics of ``reference - candidate`` in fp64.

    Quantiles are exact at any size: the differences are sorted (`torch.quantile` refuses more than 2^24).

    Args:
        candidate: any shape and floating dtype.
        reference: the same shape and dtype.
        active: bool, broadcast from the leading dimensions; the others are left out.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if candidate.shape != reference.shape or candidate.dtype != reference.dtype:
        raise ValueError(
            f"candidate must have the reference's shape and dtype {list(reference.shape)} {reference.dtype}, "
            f"got {list(candidate.shape)} {candidate.dtype}"
        )
    if active is not None:
        candidate, reference = candidate[active], reference[active]
    count = reference.numel()
    if count == 0:
        return TensorDrift(None, None, None, None, None, 0, 0, 0, True)
    equal = candidate == reference
    d = torch.where(equal, 0.0, reference.double() - candidate.double()).flatten()
    differing = count - int(equal.sum())
    del equal
    finite = d.isfinite()
    infinite = count - int(finite.sum())
    if infinite:
        d = d[finite]
    if d.numel() == 0:
        return TensorDrift(math.inf, None, None, None, None, count, differing, infinite, False)
    mean = float(d.mean())
    size = d.abs_().sort().values
    return TensorDrift(
        max_abs=math.inf if infinite else float(size[-1]),
        mean_abs=float(size.mean()),
        mean=mean,
        p95_abs=_quantile(size, 0.95),
        p99_abs=_quantile(size, 0.99),
        active_count=count,
        differing_count=differing,
        infinite_count=infinite,
        bit_equal=differing == 0,
    )


def _quantile(ascending: Tensor, q: float) -> float:
    at = q * (ascending.numel() - 1)
    low = int(at)
    below, above = float(ascending[low]), float(ascending[min(low + 1, ascending.numel() - 1)])
    return below + (at - low) * (above - below)

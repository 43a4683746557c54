"""What a row has to keep: a promise of the schedule, or a bound that follows from fp32 arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_attn_plugin.replay.difference import TensorDrift
from rl_attn_plugin.replay.results import AttentionPathDrift, Check, Unavailable, Verdict

_EPS = torch.finfo(torch.float32).eps


def bit_equal(out: TensorDrift, lse: TensorDrift | None) -> Check:
    """The schedule's promise: a row's bits do not depend on how it was computed."""
    parts = {"out": out} | ({} if lse is None else {"lse": lse})
    broken = [
        f"{name} differs in {d.differing_count} of {d.active_count}, by up to {d.max_abs:.3g}"
        for name, d in parts.items()
        if not d.bit_equal
    ]
    return Check("bit_equal", not broken, "; ".join(broken) or f"{' and '.join(parts)} bit-equal")


def merges_agree(
    out: TensorDrift, lse: TensorDrift, parts: int, largest_out: float, largest_lse: float
) -> Check:
    """Two merges of the same ``parts`` fp32 partials.

    A merge is a weighted mean with weights ``exp(lse_p - lse)`` that add up to 1. An LSE passes at most ``parts``
    additions, each of which rounds a number up to ``max |lse| + log(parts)`` once and takes a logarithm that is good to
    a few units, so one merge errs by at most ``4 parts eps max(1, |lse|)``. That error moves every weight by the same
    factor, and each of the ``parts`` products and sums rounds once more: ``(4 parts |lse| + 3 parts) eps max |out|``.
    Two merges may err in opposite directions.

    Args:
        out: of one merge against the other, in fp32.
        lse: likewise.
        parts: partials.
        largest_out: max abs of the partials' outputs.
        largest_lse: max abs of the finite LSEs.
    """
    size = max(1.0, largest_lse)
    lse_bound = 2 * 4 * parts * _EPS * size
    out_bound = 2 * (4 * parts * size + 3 * parts) * _EPS * largest_out
    found = [("out", out.max_abs or 0.0, out_bound), ("lse", lse.max_abs or 0.0, lse_bound)]
    passed = all(value <= bound for _, value, bound in found)
    return Check("within", passed, "; ".join(f"{n} {value:.3g} of {bound:.3g}" for n, value, bound in found))


def fp32_agrees(
    out: TensorDrift, lse: TensorDrift | None, *, keys: int, dim: int, score: float, value: float, largest_lse: float,
    out_dtype: torch.dtype,
) -> Check:  # fmt: skip
    """Two fp32 attentions that sum in different orders.

    A score is a sum of ``dim`` products and errs by at most ``dim eps`` of the largest score there can be,
    ``scale max |q| max |k|`` by Cauchy and Schwarz; it moves a weight by that factor. Sums over ``keys`` weights err by
    ``keys eps`` (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 4.2). A few units go to the
    exponential, the quotient and the rounding of ``out``. Two attentions may err in opposite directions.

    Args:
        out: of one against the other.
        lse: likewise.
        keys: of the longest row.
        dim: D.
        score: the largest score there can be.
        value: max abs(v).
        largest_lse: max abs of the finite LSEs.
        out_dtype: that ``out`` is rounded to.
    """
    relative = (dim * score + keys + 8) * _EPS
    bounds = {
        "out": 2 * (relative + torch.finfo(out_dtype).eps) * value,
        "lse": 2 * (relative + _EPS * largest_lse),
    }
    found = [(n, d.max_abs or 0.0, bounds[n]) for n, d in (("out", out), ("lse", lse)) if d is not None]
    passed = all(size <= bound for _, size, bound in found)
    return Check("within", passed, "; ".join(f"{n} {size:.3g} of {bound:.3g}" for n, size, bound in found))


def judge(
    drifts: Sequence[AttentionPathDrift], unavailable: Sequence[Unavailable], required: Sequence[str]
) -> tuple[Verdict, list[str]]:
    """The verdict of a comparison and why.

    Args:
        drifts: with their checks.
        unavailable: what did not run.
        required: names that may not be unavailable.
    """
    failed = [f"{d.name}: {d.check.reason}" for d in drifts if d.check is not None and not d.check.passed]
    if failed:
        return "DRIFT", failed
    missing = [f"{u.name} is required: {u.reason}" for u in unavailable if u.name in required]
    if missing:
        return "INCONCLUSIVE", missing
    kept = [d.name for d in drifts if d.check is not None]
    if not kept:
        return "INCONCLUSIVE", ["no path that ran has anything to keep"]
    return "PASS", [f"{d.name}: {d.check.reason}" for d in drifts if d.check is not None]

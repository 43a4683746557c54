"""What a comparison found, as plain values that survive JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor

from rl_attn_plugin.replay.difference import TensorDrift

SCHEMA = "rl-attn/comparison/1"
SIGN = "difference = reference - candidate; dlogp = logp_trainer - logp_rollout, nats"

RopeState = Literal["none", "pre_rope", "post_rope"]
Verdict = Literal["PASS", "DRIFT", "INCONCLUSIVE"]
Expectation = Literal["bit_equal", "within"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathProvenance:
    """How a path was computed.

    Attributes:
        attention_mode: the path's name.
        materialization: what was handed over: ``packed``, ``paged``, ``partials`` or ``dense`` tensors.
        requested_backend: as asked for.
        actual_backend: what computed the attention.
        actual_backend_source: the package or file it came from.
        fallback: whether another backend than the one asked for ran.
        fallback_reason: why.
        schedule_id: order of arithmetic along the keys, None where nobody promises one.
        chunk_bounds: of the queries, as pairs.
        kv_page_size: tokens of a page.
        kv_page_bounds: of the partials, as pairs of keys.
        kv_dtype: of the keys and values read, where it is not the inputs'.
        merge_backend: whose code merged partials.
        merge_mode: in which schedule.
        merge_order: in which order.
        rows: query positions compared, where they are a sample.
        prefix_length: tokens whose pages two sequences share.
        lse_domain: always ``attention``: over keys, not over the vocabulary.
        lse_exported: whether the path gives one.
        accum_dtype: of sums.
        downcast_at: where ``out`` is rounded to its dtype.
        q_rope_state: of the queries handed to the attention.
        k_rope_state: of the keys.
        rope: positions, theta, cast point and where the rotation happens.
        te: what the TransformerEngine oracle proved, see `OracleProvenance`.
    """

    attention_mode: str
    materialization: str
    requested_backend: str
    actual_backend: str
    actual_backend_source: str | None = None
    fallback: bool = False
    fallback_reason: str | None = None
    schedule_id: str | None = None
    chunk_bounds: list[list[int]] | None = None
    kv_page_size: int | None = None
    kv_page_bounds: list[list[int]] | None = None
    kv_dtype: str | None = None
    merge_backend: str | None = None
    merge_mode: str | None = None
    merge_order: str | None = None
    rows: list[int] | None = None
    prefix_length: int | None = None
    lse_domain: str = "attention"
    lse_exported: bool = True
    accum_dtype: str = "fp32"
    downcast_at: str = "final_write"
    q_rope_state: RopeState = "none"
    k_rope_state: RopeState = "none"
    rope: dict[str, Any] | None = None
    te: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPathResult:
    """What one path gave for the packed rows of a batch.

    Attributes:
        name: of the path.
        out: ``[T, Hq, Dv]``.
        lse: fp32 ``[Hq, T]``, or None where the path exports none.
        provenance: how.
        rows: the packed rows these are, None for all.
        q: rotated queries ``[T, Hq, D]``, where the path shows them.
        k: rotated keys.
        merged: fp32 ``out`` before it is rounded, where the path merges partials.
    """

    name: str
    out: Tensor
    lse: Tensor | None
    provenance: PathProvenance
    rows: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    merged: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """What a row has to keep, and whether it does.

    Attributes:
        expectation: ``bit_equal``: a promise of the schedule; ``within``: a bound that follows from the arithmetic.
        passed: whether it holds.
        reason: in words, with the numbers.
    """

    expectation: Expectation
    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class AttentionPathDrift:
    """One path against its reference.

    Attributes:
        name: of the path.
        reference_name: what it is held against.
        out: of the attention output.
        lse: of its log-sum-exp, None where one side has none.
        dlogp: of the active tokens' log-probs, None without a readout.
        q: of the rotated queries, where a path shows them.
        k: of the rotated keys.
        seconds: that the path took.
        check: what it has to keep, None where it informs.
        provenance: how it was computed.
    """

    name: str
    reference_name: str
    out: TensorDrift
    lse: TensorDrift | None
    dlogp: TensorDrift | None
    q: TensorDrift | None
    k: TensorDrift | None
    seconds: float
    check: Check | None
    provenance: PathProvenance


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A path that did not run.

    Attributes:
        name: of the path.
        reason: exactly why.
        te: how far the TransformerEngine oracle got, where it is about that.
    """

    name: str
    reason: str
    te: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class AttentionComparisonReport:
    """What a comparison found.

    Attributes:
        reference_name: the trainer's way, which most rows are held against.
        drifts: a row a path.
        unavailable: paths that did not run, and why.
        verdict: DRIFT if a check failed, INCONCLUSIVE if what was required is unavailable, else PASS.
        reasons: why, in words.
        label: of the inputs: synthetic, or a captured layer.
        shapes: of q, k, v and the options.
        provenance: of the process, from `rl_attn_plugin.provenance`.
        schema: of the JSON.
        sign: of every difference.
    """

    reference_name: str
    drifts: list[AttentionPathDrift]
    unavailable: list[Unavailable]
    verdict: Verdict
    reasons: list[str]
    label: str
    shapes: dict[str, Any]
    provenance: dict[str, Any]
    schema: str = field(default=SCHEMA)
    sign: str = field(default=SIGN)

    def __getitem__(self, name: str) -> AttentionPathDrift:
        """The row of a path.

        Raises:
            KeyError: it has none; the message says why where that is known.
        """
        for drift in self.drifts:
            if drift.name == name:
                return drift
        reasons = [u.reason for u in self.unavailable if u.name == name]
        raise KeyError(f"{name}: {reasons[0]}" if reasons else name)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinite difference is the string ``"inf"``."""
        data = asdict(self)
        for row, drift in zip(data["drifts"], self.drifts, strict=True):
            for part in ("out", "lse", "dlogp", "q", "k"):
                found: TensorDrift | None = getattr(drift, part)
                row[part] = None if found is None else found.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> AttentionComparisonReport:
        """The inverse of `to_dict`.

        Raises:
            ValueError: when the data has another schema.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"a comparison must have schema {SCHEMA!r}, got {data.get('schema')!r}")
        return cls(
            **{
                **data,
                "drifts": [_drift(row) for row in data["drifts"]],
                "unavailable": [Unavailable(**row) for row in data["unavailable"]],
            }
        )


def _drift(row: dict[str, Any]) -> AttentionPathDrift:
    parts = {
        part: None if row[part] is None else TensorDrift.from_dict(row[part])
        for part in ("out", "lse", "dlogp", "q", "k")
    }
    check = None if row["check"] is None else Check(**row["check"])
    return AttentionPathDrift(
        **{**row, **parts, "check": check, "provenance": PathProvenance(**row["provenance"])}
    )

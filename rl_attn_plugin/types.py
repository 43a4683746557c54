"""The vocabulary every other module speaks: results, options, and where rows and keys lie in memory.

Shape legend, used in every docstring of the package::

    B   sequences            T   packed tokens          S   tokens of a dense sequence
    Hq  query heads          Hkv key/value heads        G = Hq / Hkv
    D   query/key head dim   Dv  value head dim         V   vocabulary

Packed tensors are ``[T, H, D]`` ("thd"), dense ones ``[B, S, H, D]`` ("bshd"), paged caches
``[num_pages, page_size, Hkv, D]``; strides are free in all of them. ``lse`` is fp32 and natural log:
``[Hq, T]`` packed, ``[B, Hq, S]`` dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

CausalAlignment = Literal["bottom_right", "top_left"]

SCHEDULE_VERSION = 1


class Impl(str, Enum):
    """Which code computes the attention. ``AUTO`` picks by device; the others never fall back."""

    AUTO = "auto"
    TRITON = "triton"
    TORCH = "torch"


class AttentionOutput(NamedTuple):
    """What every attention function returns; read it by name, more fields may come.

    Attributes:
        out: ``[T, Hq, Dv]`` or ``[B, S, Hq, Dv]``.
        lse: fp32 natural-log log-sum-exp of the scaled, soft-capped, sink-including scores,
            ``[Hq, T]`` or ``[B, Hq, S]``; ``-inf`` for rows with nothing to attend to.
        max_logits: fp32 ``[Hq]``, the largest scaled and soft-capped score of each head over the
            whole call (sinks excluded), or None unless asked for.
    """

    out: Tensor
    lse: Tensor
    max_logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of arithmetic along the keys. Two calls with one schedule give a row the same bits.

    Keys are cut at absolute positions: online softmax over ascending blocks of ``block_k`` keys inside a
    split of ``split_k`` keys, then splits merged in ascending order. A schedule is versioned: a new
    version means other bits.
    """

    block_k: int = 64
    split_k: int = 1024

    def __post_init__(self) -> None:
        if self.block_k < 16 or self.block_k & (self.block_k - 1):
            raise ValueError(f"Schedule.block_k must be a power of two of at least 16, got {self.block_k}")
        if self.split_k < self.block_k or self.split_k % self.block_k:
            raise ValueError(
                f"Schedule.split_k must be a positive multiple of block_k "
                f"({self.block_k}), got {self.split_k}"
            )

    @property
    def id(self) -> str:
        return f"v{SCHEDULE_VERSION}/bk{self.block_k}/sk{self.split_k}"


def default_schedule(head_dim: int, v_head_dim: int, dtype: torch.dtype, arch: str) -> Schedule:
    """The schedule used when none is given: a function of these four alone, never of lengths or batch.

    Args:
        head_dim: D.
        v_head_dim: Dv.
        dtype: of q, k and v.
        arch: ``"cpu"``, ``"sm_90"``, ``"gfx942"`` and the like.
    """
    del (
        dtype,
        arch,
    )  # every (dtype, arch) shares v1; they are arguments because a later version may split them
    return Schedule(32, 1024) if max(head_dim, v_head_dim) > 128 else Schedule(64, 1024)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding tables and the positions to read them at.

    Attributes:
        cos: fp32 ``[max_position, rotary_dim / 2]``.
        sin: fp32, as ``cos``.
        positions: int32 or int64, ``[T]`` packed or ``[B, S]`` dense: the table row of each query token.
        interleaved: False rotates (x[i], x[i + rotary_dim/2]) pairs, True (x[2i], x[2i + 1]).
        rotary_dim: how many leading channels rotate; None means all of them.
        positions_k: positions of the keys where they differ from the queries' (Sq != Sk).
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    interleaved: bool = False
    rotary_dim: int | None = None
    positions_k: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each sequence's queries and keys lie. Tensors are int32 on the device of q, or None.

    Exactly one of three forms, told apart by what is set: dense (no ``cu_seqlens_q``), packed
    (``cu_seqlens_q`` and ``cu_seqlens_k``), paged (``cu_seqlens_q``, ``seqused_k`` and ``block_table``).

    Attributes:
        max_seqlen_q: host bound on the queries of a sequence; may be larger than the truth.
        max_seqlen_k: the same for keys.
        cu_seqlens_q: ``[B + 1]`` memory offsets of the sequences' queries.
        cu_seqlens_k: ``[B + 1]`` memory offsets of the sequences' keys.
        seqused_q: ``[B]`` real query counts inside those offsets (default: all).
        seqused_k: ``[B]`` real key counts; the paged form always has it.
        kv_start: ``[B]`` absolute index of the first key handed over (default 0).
        block_table: ``[B, max_pages]``; entries past a sequence's length are never read.
        key_padding_mask: bool ``[B, S]``, True = keep; dense only.
    """

    max_seqlen_q: int
    max_seqlen_k: int
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    kv_start: Tensor | None = None
    block_table: Tensor | None = None
    key_padding_mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The mathematics of one attention call, resolved: no None, no aliases.

    With ``p_i`` the absolute position of query i (``kv_start + Sk - Sq + i`` bottom-right, ``i``
    top-left) and ``c_j = kv_start + j`` that of key j, key j is visible to query i iff it is inside the
    sequence, kept by the padding mask, ``c_j >= p_i - window_left`` (unless -1) and
    ``c_j <= p_i + window_right`` (unless -1). ``causal`` has already been folded into ``window_right``.

    Attributes:
        scale: multiplies q @ k.
        window_left: keys to the left of the diagonal, inclusive; -1 unlimited.
        window_right: keys to the right of the diagonal, inclusive; -1 unlimited, 0 causal.
        top_left: where the diagonal starts.
        softcap: s -> softcap * tanh(s / softcap); 0 is off.
        block_k: see `Schedule`.
        split_k: see `Schedule`.
        out_dtype: dtype of ``out``.
        return_max_logits: fill ``max_logits``.
    """

    scale: float
    window_left: int
    window_right: int
    top_left: bool
    softcap: float
    block_k: int
    split_k: int
    out_dtype: torch.dtype
    return_max_logits: bool


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """How one step's paged attention is spread over the device; made by `plan_paged`, shared by all layers.

    Attributes:
        work: int32 table of work items on the device, or None where the implementation needs none.
        num_slots: host int, partial states that the workspace must hold.
    """

    work: Tensor | None
    num_slots: int

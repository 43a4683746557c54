"""Device-side pieces that several kernels share: which rows a program owns, which keys they see, loads.

Vocabulary: an *entry* is a run of memory rows that one kind of row fills. Dense batches have one entry a
sequence. Packed tensors have ``B + 2``: the rows before the first sequence, the sequences, and the rows
after the last; the outer two hold padding only. Query rows are packed over the heads of a group: row ``r``
of an entry is query ``r // G`` and group head ``r % G``, so a decode step fills ``G`` rows of a tile.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Tensors of a few integers that callers slice as they like: code that depended on their alignment would be compiled anew
# in the middle of a decode, for no gain.
INDEX_TENSORS = ["CuQ", "CuK", "UsedQ", "UsedK", "KvStart", "Table", "Work", "Slots", "Places"]

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# How program ids map to entries and tiles.
DENSE: tl.constexpr = tl.constexpr(0)  # a batch of equal sequences: tiles per sequence known
DIRECT: tl.constexpr = tl.constexpr(1)  # packed, short sequences: the same number of tiles for every entry
SEARCH: tl.constexpr = tl.constexpr(2)  # packed: about rows / tile + entries programs, found by a search
PLANNED: tl.constexpr = tl.constexpr(3)  # a table of work items made by plan_paged

# The row maximum of a state that has seen no key. Finite, so that no difference of maxima is NaN, and far
# below any score, so that its weight against a real state is exactly 0.
EMPTY: tl.constexpr = tl.constexpr(-1.0e30)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
# The interpreter multiplies the bit patterns of bfloat16 values, so it computes in fp32.
UPCAST: tl.constexpr = tl.constexpr(INTERPRET)


@triton.jit
def entry_begin(index, Cu, batch, total):
    """First memory row of a packed entry; ``index`` may be ``batch + 2``, the end of the last one."""
    inside = (index >= 1) & (index <= batch + 1)
    begin = tl.load(Cu + tl.where(inside, index - 1, 0))
    return tl.where(index == 0, 0, tl.where(inside, begin, total))


@triton.jit
def find_entry(tile, Cu, batch, total, steps, group: tl.constexpr, block: tl.constexpr):
    """The entry that owns a tile, and the tile's index inside it.

    Entry ``i`` starts at tile ``begin_i * group // block + i``, which leaves room for the ragged last tile
    of every entry before it without knowing their lengths; some tiles stay empty.
    """
    low = 0
    high = batch + 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        start = entry_begin(middle, Cu, batch, total) * group // block + middle
        below = start <= tile
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle - 1)
    return low, tile - (entry_begin(low, Cu, batch, total) * group // block + low)


@triton.jit
def lengths(index, CuQ, CuK, UsedQ, UsedK, KvStart, batch, total, seq_q, seq_k, PACKED: tl.constexpr):
    """Memory rows and real lengths of an entry.

    Returns:
        sequence (clamped to a readable index), first query row, memory rows, real queries, first key row,
        real keys, absolute index of the first key.
    """
    if PACKED:
        row = entry_begin(index, CuQ, batch, total)
        span = entry_begin(index + 1, CuQ, batch, total) - row
        real = (index >= 1) & (index <= batch)
        sequence = tl.where(real, index - 1, 0)
        num_q = span
        if UsedQ is not None:
            num_q = tl.minimum(tl.load(UsedQ + sequence), span)
        key_row = 0
        num_k = 0
        if CuK is not None:
            key_row = tl.load(CuK + sequence)
            num_k = tl.load(CuK + sequence + 1) - key_row
        if UsedK is not None:
            num_k = tl.load(UsedK + sequence)
        num_q = tl.where(real, num_q, 0)
        num_k = tl.where(real, num_k, 0)
    else:
        sequence = index
        row = 0
        span = seq_q
        num_q = seq_q
        key_row = 0
        num_k = seq_k
    start = 0
    if KvStart is not None:
        start = tl.load(KvStart + sequence)
    return sequence, row, span, num_q, key_row, num_k, start


@triton.jit
def first_position(num_q, num_k, start, TOP_LEFT: tl.constexpr):
    """Absolute position of query 0."""
    if TOP_LEFT:
        position = 0
    else:
        position = start + num_k - num_q
    return position


@triton.jit
def visible_keys(first, last, start, end, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Absolute keys that some query at a position in ``[first, last]`` sees, and those that all of them see.

    Returns:
        low, high: the union; empty if ``high <= low``.
        full_low, full_high: the intersection; empty if ``full_high <= full_low``.
    """
    low = start
    high = end
    full_low = start
    full_high = end
    if HAS_LEFT:
        low = tl.maximum(start, first - left)
        full_low = tl.maximum(start, last - left)
    if HAS_RIGHT:
        high = tl.minimum(end, last + right + 1)
        full_high = tl.maximum(tl.minimum(end, first + right + 1), 0)
    return low, high, full_low, full_high


@triton.jit
def spread(Base, offset, stride_d, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Pointers ``[rows, BLOCK_D]`` from a row offset each.

    int32 offsets are summed before they meet the base, so that a loop-invariant tile costs one wide
    multiply-add a vector; int64 ones join the pointer of their channel, for the same reason.
    """
    d = tl.arange(0, BLOCK_D) * stride_d
    if WIDE:
        pointers = (Base + d)[None, :] + offset[:, None]
    else:
        pointers = Base + (offset[:, None] + d[None, :])
    return pointers


@triton.jit
def load_rows(
    Base, offset, stride_d, inside, DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """A ``[rows, BLOCK_D]`` tile; rows outside and padded channels are selected to 0, never multiplied."""
    d = tl.arange(0, BLOCK_D)
    pointers = spread(Base, offset, stride_d, BLOCK_D, WIDE)
    if MASKED and DIM != BLOCK_D:
        x = tl.load(pointers, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
    elif MASKED:
        x = tl.load(pointers, mask=inside[:, None], other=0.0)
    elif DIM != BLOCK_D:
        x = tl.load(pointers, mask=(d < DIM)[None, :], other=0.0)
    else:
        x = tl.load(pointers)
    return x.to(dtype)


@triton.jit
def load_rows_transposed(
    Base, offset, stride_d, inside, DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The same rows as ``[BLOCK_D, rows]``.

    A transposed view on a GPU, where both operands of a product then share one load layout. The interpreter
    loads it transposed instead: its BLAS rounds differently by tile size when an operand is a view.
    """
    if UPCAST:
        d = tl.arange(0, BLOCK_D)
        keep = (d < DIM)[:, None] & (offset == offset)[None, :]
        if MASKED:
            keep = keep & inside[None, :]
        x = tl.load(Base + offset[None, :] + (d * stride_d)[:, None], mask=keep, other=0.0).to(dtype)
    else:
        x = tl.trans(load_rows(Base, offset, stride_d, inside, DIM, BLOCK_D, MASKED, WIDE, dtype))
    return x


@triton.jit
def tanh(x):
    """Hyperbolic tangent to about one unit of fp32, from operations that every backend has.

    (1 - e) / (1 + e) with e = exp(-2 |x|) cancels near 0, where a polynomial takes over.
    """
    size = tl.abs(x)
    e = tl.exp2(size * -2.8853900817779268)
    outer = (1.0 - e) / (1.0 + e)
    y = x * x
    series = tl.fma(y, -0.008863235529902197, 0.021869488536155203)
    series = tl.fma(y, series, -0.05396825396825397)
    series = tl.fma(y, series, 0.13333333333333333)
    series = tl.fma(y, series, -0.3333333333333333)
    inner = tl.fma(size * y, series, size)
    return tl.where(x < 0, -1.0, 1.0) * tl.where(size < 0.4, inner, outer)


@triton.jit
def bend(scores, inner, SOFTCAP: tl.constexpr, FACTOR: tl.constexpr):
    """What the base-2 scale multiplies: the product itself, its negative, or its capped form."""
    if SOFTCAP:
        scores = tanh(scores * inner)
    elif FACTOR != 1:
        scores = scores * FACTOR
    return scores


@triton.jit
def merge_states(M, L, A, m, l, acc, a_shape: tl.constexpr):
    """Fold the state of the next split into the running one; both unnormalised, fp32.

    The contraction is part of the schedule: every implementation writes ``fma(A, a, acc * b)``. An empty
    state (`EMPTY`, 0, 0) leaves the running one exactly as it was.
    """
    top = tl.maximum(M, m)
    a = tl.exp2(M - top)
    b = tl.exp2(m - top)
    L = tl.fma(L, a, l * b)
    if a_shape == 2:
        A = tl.fma(A, a[:, None], acc * b[:, None])
    else:
        A = tl.fma(A, a, acc * b)
    return top, L, A


@triton.jit
def finish(M, L):
    """Weight that normalises an accumulator, and the natural-log LSE, of a merged state."""
    some = L > 0
    safe = tl.where(some, L, 1.0)
    weight = tl.where(some, 1.0 / safe, 0.0)
    lse = tl.where(some, (M + tl.log2(safe)) * LN_2, float("-inf"))
    return weight, lse


@triton.jit
def store_padding(
    Out, Lse, RowMax, row, span, begin, step, head, out_t, out_h, out_d, lse_h,
    HAS_MAX: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write 0 and -inf to every ``step``-th tile of an entry that holds padding only."""
    d = tl.arange(0, BLOCK_DV)
    for tile in range(begin, tl.cdiv(span * G, BLOCK_M), step):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = rows < span * G
        query = (row + rows // G).to(tl.int64)
        heads = (head * G + rows % G).to(tl.int64)
        target = (query * out_t + heads * out_h)[:, None] + (d * out_d)[None, :]
        zero = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32).to(Out.dtype.element_ty)
        tl.store(Out + target, zero, mask=inside[:, None] & (d < DV)[None, :])
        nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
        tl.store(Lse + heads * lse_h + query, nothing, mask=inside)
        if HAS_MAX:
            tl.store(RowMax + heads * lse_h + query, nothing, mask=inside)

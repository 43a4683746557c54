"""The backward: deterministic, no atomics. Two passes recompute the probabilities from ``lse``.

One pass walks the query rows that see a tile of keys and sums dk and dv; the other walks the keys that a
tile of query rows sees and sums dq. Each sum has one order, given by the sequence alone. The heads of a
group are rows of one walk, so dk and dv need no reduction over heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_attn_plugin.kernels import schedule
from rl_attn_plugin.kernels.forward import call_arguments, is_wide, strides
from rl_attn_plugin.kernels.launch import launch
from rl_attn_plugin.kernels.rope import rope_arguments, turn, turn_back
from rl_attn_plugin.kernels.tiles import (
    DENSE,
    INDEX_TENSORS,
    LOG2_E,
    UPCAST,
    bend,
    find_entry,
    first_position,
    lengths,
    load_rows,
    visible_keys,
)
from rl_attn_plugin.types import Layout, Options, Rope

_LENGTHS = ["kv_heads", "batch", "total", "seq_q", "seq_k", "tiles", "steps", "left", "right"]
_ROWS = 64  # rows of a program of the two row-wise kernels


@triton.jit(do_not_specialize=["rows"])
def statistics_kernel(
    Out, DOut, Lse, DLse, RowLse, Delta, rows, out_b, out_t, out_h, out_d, dout_b, dout_t, dout_h, dout_d,
    lse_b, lse_h, dlse_b, dlse_h, dlse_t, stat_b, stat_h,
    G: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Base-2 lse and ``delta = rowsum(out * dout) - dlse``, laid out as the walks read them.

    Row ``t * G + g`` of a kv head holds query t of group head g, so a block of packed rows is contiguous.
    """
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_DV)
    inside = t < rows
    keep = inside[:, None] & (d < DV)[None, :]
    source = Out + b * out_b + head * out_h
    out = tl.load(source + t[:, None] * out_t + (d * out_d)[None, :], mask=keep, other=0.0).to(tl.float32)
    source = DOut + b * dout_b + head * dout_h
    dout = tl.load(source + t[:, None] * dout_t + (d * dout_d)[None, :], mask=keep, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if DLse is not None:
        delta -= tl.load(DLse + b * dlse_b + head * dlse_h + t * dlse_t, mask=inside, other=0.0)
    lse = tl.load(Lse + b * lse_b + head * lse_h + t, mask=inside, other=0.0)
    target = b * stat_b + head // G * stat_h + t * G + head % G
    tl.store(RowLse + target, lse * LOG2_E, mask=inside)
    tl.store(Delta + target, delta, mask=inside)


@triton.jit(do_not_specialize=["batch", "rows"])
def sinks_kernel(
    RowLse, Delta, Sinks, DSinks, batch, rows, stat_b, stat_h, G: tl.constexpr, ROWS: tl.constexpr
):
    """``dsink = -sum(exp(sink - lse) * delta)`` of one head, in one order."""
    head = tl.program_id(0).to(tl.int64)
    sink = tl.load(Sinks + head).to(tl.float32) * LOG2_E
    total = tl.zeros([ROWS], tl.float32)
    RowLse += head // G * stat_h + head % G
    Delta += head // G * stat_h + head % G
    for _ in range(batch):
        for t0 in range(0, rows, ROWS):
            t = (t0 + tl.arange(0, ROWS)).to(tl.int64)
            lse = tl.load(RowLse + t * G, mask=t < rows, other=float("-inf"))
            delta = tl.load(Delta + t * G, mask=t < rows, other=0.0)
            real = lse > float("-inf")  # padding and empty rows have no share
            share = tl.exp2(sink - tl.where(real, lse, 0.0))
            total += tl.where(real, share * delta, 0.0)
        RowLse += stat_b
        Delta += stat_b
    tl.store(DSinks + head, (0.0 - tl.sum(total, 0)).to(DSinks.dtype.element_ty))


@triton.jit
def _probabilities(bent, lse, seen, scale_log2, MASKED: tl.constexpr):
    """exp(score - lse) of a tile; ``lse`` is base 2 and broadcasts."""
    p = tl.exp2(tl.fma(bent, scale_log2, -lse))
    if MASKED:  # select after the exponential: it may overflow where nothing is seen
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def _score_gradient(p, dp, delta, bent, seen, MASKED: tl.constexpr, SOFTCAP: tl.constexpr):
    """Gradient of the loss in the scores, but for ``scale``; ``delta`` broadcasts."""
    ds = p * (dp - delta)
    if SOFTCAP:
        ds = ds * tl.fma(-bent, bent, 1.0)
    if MASKED:
        ds = tl.where(seen, ds, 0.0)
    return ds


@triton.jit
def _visible(position, absolute, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which keys the mask shows; one argument is a row, the other a column."""
    seen = (position == position) & (absolute == absolute)
    if HAS_LEFT:
        seen = seen & (absolute >= position - left)
    if HAS_RIGHT:
        seen = seen & (absolute <= position + right)
    return seen


@triton.jit
def _walk_queries(
    dk, dv, k, v, Q, DOut, RowLse, Delta, absolute, valid, begin, end, gap_begin, gap_end, num_q, origin, left, right,
    inner, scale_log2, q_t, q_h, q_d, dout_t, dout_h, dout_d,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    FACTOR: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what rows ``[begin, end)`` but those of the gap contribute to dk and dv.

    All products are formed transposed, keys first. The masked walk takes the rows on both sides of the
    unmasked one in one loop: with three loops ptxas 12.8 runs every product by itself.
    """
    for at in tl.range(begin, end - (gap_end - gap_begin), BLOCK_M, num_stages=STAGES):
        r0 = tl.where(at < gap_begin, at, at + (gap_end - gap_begin))
        rows = r0 + tl.arange(0, BLOCK_M)
        inside = rows < num_q * G
        query = rows // G
        # offsets count from the sequence's first row and the group's first head
        if BLOCK_M % G == 0:  # a block starts at a query, which keeps divisions out of the loop
            lane = tl.arange(0, BLOCK_M)
            token = r0 // G + lane // G
            member = lane % G
        else:
            token = query
            member = rows % G
        if WIDE:
            token = token.to(tl.int64)
        q_offset = token * q_t + member * q_h
        dout_offset = token * dout_t + member * dout_h
        q = load_rows(Q, q_offset, q_d, inside, D, BLOCK_D, MASKED, WIDE, k.dtype)
        dout = load_rows(DOut, dout_offset, dout_d, inside, DV, BLOCK_DV, MASKED, WIDE, k.dtype)
        if MASKED:
            lse = tl.load(RowLse + rows, mask=inside, other=0.0)
            delta = tl.load(Delta + rows, mask=inside, other=0.0)
        else:
            lse = tl.load(RowLse + rows)
            delta = tl.load(Delta + rows)
        bent = bend(tl.dot(k, tl.trans(q), input_precision="ieee"), inner, SOFTCAP, FACTOR)
        seen = valid[:, None]
        if MASKED:
            seen = _visible((origin + query)[None, :], absolute[:, None], left, right, HAS_LEFT, HAS_RIGHT)
            seen = seen & valid[:, None] & inside[None, :]
        p = _probabilities(bent, lse[None, :], seen, scale_log2, MASKED)
        dv = tl.dot(p.to(k.dtype), dout, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
        ds = _score_gradient(p, dp, delta[None, :], bent, seen, MASKED, SOFTCAP)
        dk = tl.dot(ds.to(k.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=INDEX_TENSORS)
def backward_kv_kernel(
    Q, K, V, DOut, RowLse, Delta, DK, DV_, CuQ, CuK, UsedQ, UsedK, KvStart, Keep, Cos, Sin, Places,
    scale, inner, scale_log2, kv_heads, batch, total, total_k, seq_q, seq_k, tiles, steps, left, right,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, dout_b, dout_t, dout_h, dout_d,
    dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, stat_b, stat_h, keep_b, keep_t,
    cos_p, cos_d, sin_p, sin_d, places_b, places_t,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, MODE: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FACTOR: tl.constexpr,
    STAGES: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one kv head."""
    # causal: the first keys have the most queries; every head's heaviest tile starts before any light one
    head = tl.program_id(0) % kv_heads
    tile = tl.program_id(0) // kv_heads
    if MODE == DENSE:
        entry = tile // tiles
        tile = tile % tiles
    else:
        entry, tile = find_entry(tile, CuK, batch, total_k, steps, 1, BLOCK_N)
        if (entry == 0) | (entry == batch + 1):
            return
    sequence, row, _, num_q, key_row, num_k, start = lengths(
        entry, CuQ, CuK, UsedQ, UsedK, KvStart, batch, total, seq_q, seq_k, MODE != DENSE
    )
    if tile * BLOCK_N >= num_k:
        return

    index = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = index < num_k
    sequence = sequence.to(tl.int64)
    batch_index = sequence if MODE == DENSE else 0 * sequence
    stored = valid
    whole = tile * BLOCK_N + BLOCK_N <= num_k
    if Keep is not None:
        valid = valid & (tl.load(Keep + sequence * keep_b + index * keep_t, mask=valid, other=0) != 0)
        whole = False
    head64 = head.to(tl.int64)
    token = (key_row + index).to(tl.int64)
    compute = tl.float32 if UPCAST else Q.dtype.element_ty
    k = load_rows(
        K + batch_index * k_b + head64 * k_h, token * k_t, k_d, valid, D, BLOCK_D, True, True, compute
    )
    v = load_rows(
        V + batch_index * v_b + head64 * v_h, token * v_t, v_d, valid, DV, BLOCK_DV, True, True, compute
    )
    row64 = row + 0 * head64
    Q += batch_index * q_b + row64 * q_t + head64 * G * q_h
    DOut += batch_index * dout_b + row64 * dout_t + head64 * G * dout_h
    stat = batch_index * stat_b + head64 * stat_h + row * G
    RowLse += stat
    Delta += stat

    # queries that see some key of the tile, and queries that see all of them
    origin = first_position(num_q, num_k, start, TOP_LEFT)
    first = start + tile * BLOCK_N - origin
    last = start + tl.minimum(tile * BLOCK_N + BLOCK_N, num_k) - 1 - origin
    low = 0
    high = num_q
    full_low = 0
    full_high = num_q
    if HAS_RIGHT:
        low = tl.maximum(low, first - right)
        full_low = tl.maximum(full_low, last - right)
    if HAS_LEFT:
        high = tl.maximum(tl.minimum(high, last + left + 1), 0)
        full_high = tl.maximum(tl.minimum(full_high, first + left + 1), 0)
    begin = low * G // BLOCK_M * BLOCK_M
    end = high * G
    full_begin = tl.minimum(
        tl.maximum(tl.cdiv(full_low * G, BLOCK_M) * BLOCK_M, begin), tl.maximum(end, begin)
    )
    full_end = tl.maximum(full_high * G // BLOCK_M * BLOCK_M, full_begin)
    full_end = tl.where(whole, full_end, full_begin)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    absolute = start + index
    dk, dv = _walk_queries(
        dk, dv, k, v, Q, DOut, RowLse, Delta, absolute, valid, begin, end, full_begin, full_end, num_q, origin,
        left, right, inner, scale_log2, q_t, q_h, q_d, dout_t, dout_h, dout_d,
        True, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, WIDE, STAGES,
    )  # fmt: skip
    if Keep is None:
        dk, dv = _walk_queries(
            dk, dv, k, v, Q, DOut, RowLse, Delta, absolute, valid, full_begin, full_end, full_end, full_end, num_q,
            origin, left, right, inner, scale_log2, q_t, q_h, q_d, dout_t, dout_h, dout_d,
            False, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, WIDE, STAGES,
        )  # fmt: skip

    d = tl.arange(0, BLOCK_D)
    target = DK + batch_index * dk_b + head64 * dk_h + (token * dk_t)[:, None] + d[None, :]
    dk = dk * scale
    if HALF:
        place = tl.load(Places + batch_index * places_b + token * places_t, mask=stored, other=0)
        dk = turn_back(
            dk, stored, place, Cos, Sin, cos_p, cos_d, sin_p, sin_d, DK.dtype.element_ty,
            HALF, BLOCK_D, INTERLEAVED, BLOCK_N,
        )  # fmt: skip
    tl.store(target, dk.to(DK.dtype.element_ty), mask=stored[:, None] & (d < D)[None, :])
    d = tl.arange(0, BLOCK_DV)
    target = DV_ + batch_index * dv_b + head64 * dv_h + (token * dv_t)[:, None] + d[None, :]
    tl.store(target, dv.to(DV_.dtype.element_ty), mask=stored[:, None] & (d < DV)[None, :])


@triton.jit
def _walk_keys(
    dq, q, dout, lse, delta, K, V, Keep, position, begin, end, gap_begin, gap_end, start, num_k, left, right,
    inner, scale_log2, k_t, k_d, v_t, v_d, keep_t,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    FACTOR: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what keys ``[begin, end)`` but those of the gap (relative to the sequence) contribute to dq."""
    for at in tl.range(begin, end - (gap_end - gap_begin), BLOCK_N, num_stages=STAGES):
        n0 = tl.where(at < gap_begin, at, at + (gap_end - gap_begin))
        index = n0 + tl.arange(0, BLOCK_N)
        inside = index < num_k
        if MASKED and Keep is not None:
            inside = inside & (tl.load(Keep + index * keep_t, mask=inside, other=0) != 0)
        near = index.to(tl.int64) if WIDE else index
        k = load_rows(K, near * k_t, k_d, inside, D, BLOCK_D, MASKED, WIDE, q.dtype)
        v = load_rows(V, near * v_t, v_d, inside, DV, BLOCK_DV, MASKED, WIDE, q.dtype)
        bent = bend(tl.dot(q, tl.trans(k), input_precision="ieee"), inner, SOFTCAP, FACTOR)
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        seen = inside[None, :]
        if MASKED:
            seen = _visible(position[:, None], (start + index)[None, :], left, right, HAS_LEFT, HAS_RIGHT)
            seen = seen & inside[None, :]
        p = _probabilities(bent, lse[:, None], seen, scale_log2, MASKED)
        ds = _score_gradient(p, dp, delta[:, None], bent, seen, MASKED, SOFTCAP)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=INDEX_TENSORS)
def backward_q_kernel(
    Q, K, V, DOut, RowLse, Delta, DQ, CuQ, CuK, UsedQ, UsedK, KvStart, Keep, Cos, Sin, Places,
    scale, inner, scale_log2, kv_heads, batch, total, seq_q, seq_k, tiles, steps, left, right,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, dout_b, dout_t, dout_h, dout_d,
    dq_b, dq_t, dq_h, stat_b, stat_h, keep_b, keep_t,
    cos_p, cos_d, sin_p, sin_d, places_b, places_t,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, MODE: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FACTOR: tl.constexpr,
    STAGES: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """dq of one tile of query rows of one kv head."""
    per_head = tl.num_programs(0) // kv_heads
    head = tl.program_id(0) // per_head
    tile = per_head - 1 - tl.program_id(0) % per_head
    if MODE == DENSE:
        entry = tile // tiles
        tile = tile % tiles
    else:
        entry, tile = find_entry(tile, CuQ, batch, total, steps, G, BLOCK_M)
    sequence, row, _, num_q, key_row, num_k, start = lengths(
        entry, CuQ, CuK, UsedQ, UsedK, KvStart, batch, total, seq_q, seq_k, MODE != DENSE
    )
    if tile * BLOCK_M >= num_q * G:
        return

    origin = first_position(num_q, num_k, start, TOP_LEFT)
    first = origin + (tile * BLOCK_M) // G
    last = origin + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // G, num_q - 1)
    low, high, full_low, full_high = visible_keys(
        first, last, start, start + num_k, left, right, HAS_LEFT, HAS_RIGHT
    )
    begin = (low - start) // BLOCK_N * BLOCK_N
    end = tl.maximum(high - start, 0)
    full_begin = tl.minimum(
        tl.maximum(tl.cdiv(full_low - start, BLOCK_N) * BLOCK_N, begin), tl.maximum(end, begin)
    )
    full_end = tl.maximum(tl.maximum(full_high - start, 0) // BLOCK_N * BLOCK_N, full_begin)
    if Keep is not None:
        full_begin = begin
        full_end = begin

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = rows // G
    heads = (head * G + rows % G).to(tl.int64)
    real = query < num_q
    token = (row + query).to(tl.int64)
    sequence = sequence.to(tl.int64)
    batch_index = sequence if MODE == DENSE else 0 * sequence
    compute = tl.float32 if UPCAST else Q.dtype.element_ty
    q = load_rows(
        Q + batch_index * q_b, token * q_t + heads * q_h, q_d, real, D, BLOCK_D, True, True, compute
    )
    dout = load_rows(
        DOut + batch_index * dout_b,
        token * dout_t + heads * dout_h,
        dout_d,
        real,
        DV,
        BLOCK_DV,
        True,
        True,
        compute,
    )
    head64 = head.to(tl.int64)
    line = batch_index * stat_b + head64 * stat_h + row * G + rows
    lse = tl.load(RowLse + line, mask=real, other=0.0)
    delta = tl.load(Delta + line, mask=real, other=0.0)
    K += batch_index * k_b + head64 * k_h + key_row.to(tl.int64) * k_t
    V += batch_index * v_b + head64 * v_h + key_row.to(tl.int64) * v_t
    if Keep is not None:
        Keep += sequence * keep_b

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    position = origin + query
    dq = _walk_keys(
        dq, q, dout, lse, delta, K, V, Keep, position, begin, end, full_begin, full_end, start, num_k, left, right,
        inner, scale_log2, k_t, k_d, v_t, v_d, keep_t,
        True, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, WIDE, STAGES,
    )  # fmt: skip
    if Keep is None:
        dq = _walk_keys(
            dq, q, dout, lse, delta, K, V, Keep, position, full_begin, full_end, full_end, full_end, start, num_k, left,
            right, inner, scale_log2, k_t, k_d, v_t, v_d, keep_t,
            False, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, WIDE, STAGES,
        )  # fmt: skip
    dq = dq * scale
    if HALF:
        place = tl.load(Places + batch_index * places_b + token * places_t, mask=real, other=0)
        dq = turn_back(
            dq, real, place, Cos, Sin, cos_p, cos_d, sin_p, sin_d, DQ.dtype.element_ty,
            HALF, BLOCK_D, INTERLEAVED, BLOCK_M,
        )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    target = DQ + batch_index * dq_b + (token * dq_t + heads * dq_h)[:, None] + d[None, :]
    tl.store(target, dq.to(DQ.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    options: Options,
    *,
    sinks: Tensor | None,
    rope: Rope | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of ``(out, lse)``; rows and keys outside every sequence get 0.

    Args:
        dout: as ``out``, any strides.
        dlse: as ``lse``, or None.
        q: of the forward; k and v too, dense or packed.
        k: see q.
        v: see q.
        out: result of the forward.
        lse: result of the forward.
        layout: of the forward.
        options: of the forward.
        sinks: of the forward.
        rope: of the forward; q and k are not rotated yet, and dq and dk are turned back as they are stored.

    Returns:
        dq, dk, dv in the dtypes of q, k, v, and dsinks or None.
    """
    dense = layout.cu_seqlens_q is None
    heads, kv_heads, dim, v_dim = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    batch = q.shape[0] if dense else layout.cu_seqlens_q.shape[0] - 1  # type: ignore[union-attr]
    # dense tiles cover every row; packed tensors may hold rows that no sequence owns
    make = torch.empty if dense else torch.zeros
    dq, dk, dv = (make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    if batch == 0 or q.numel() == 0 or k.numel() == 0:
        if sinks is None or dlse is None or batch == 0 or q.numel() == 0:
            return dq.zero_(), dk.zero_(), dv.zero_(), dsinks
    if rope is not None:
        q, k = turn(q, rope, rope.positions), turn(k, rope, rope.positions_k)
    rows = q.shape[1] if dense else q.shape[0]
    lse = lse.contiguous()
    row_lse, delta = torch.empty(2, lse.numel(), dtype=torch.float32, device=q.device)
    arguments = call_arguments(q, k, v, out, lse, layout, options) | {
        "DOut": dout, "DLse": dlse, "RowLse": row_lse, "Delta": delta,
        "DQ": dq, "DK": dk, "DV_": dv, "Sinks": sinks, "DSinks": dsinks,
        "stat_b": heads * rows if dense else 0, "stat_h": heads // kv_heads * rows,
        "scale": options.scale, "rows": rows, "total_k": k.shape[0], "ROWS": _ROWS,

        **strides("dout", dout, dense), **strides("dq", dq, dense), **strides("dk", dk, dense),
        **strides("dv", dv, dense),
    }  # fmt: skip
    arguments["WIDE"] |= is_wide(dout, layout.max_seqlen_q)
    if dlse is not None:
        arguments |= {
            "dlse_b": dlse.stride(0) if dense else 0,
            "dlse_h": dlse.stride(-2),
            "dlse_t": dlse.stride(-1),
        }
    else:
        arguments |= {"dlse_b": 0, "dlse_h": 0, "dlse_t": 0}

    grid = (schedule.cdiv(rows, _ROWS), heads, batch if dense else 1)
    launch(statistics_kernel, grid, arguments, warps=4, stages=1)
    if sinks is not None:
        more = {"ROWS": 1024, "batch": batch if dense else 1}
        launch(sinks_kernel, (heads,), arguments | more, warps=4, stages=1)
    if k.numel() == 0:
        return dq.zero_(), dk, dv, dsinks

    for kernel, shape in zip(
        (backward_kv_kernel, backward_q_kernel), schedule.backward_tiles(q.dtype, dim, v_dim), strict=True
    ):
        on_keys = kernel is backward_kv_kernel
        size, length = (shape.keys, k.shape[1]) if on_keys else (shape.rows, q.shape[1] * heads // kv_heads)
        if dense:
            tiles, mode = schedule.cdiv(length, size), 0
            programs = tiles * batch
        else:
            tiles, mode = 1, 2
            units = k.shape[0] if on_keys else q.shape[0] * heads // kv_heads
            programs = units // size + batch + 2
        places = None if rope is None else rope.positions_k if on_keys else rope.positions
        more = {
            "BLOCK_M": shape.rows, "BLOCK_N": shape.keys, "STAGES": shape.stages, "MODE": mode, "tiles": tiles,
            **rope_arguments(rope, places),
        }  # fmt: skip
        launch(kernel, (programs * kv_heads,), arguments | more, warps=shape.warps, stages=shape.stages)
    return dq, dk, dv, dsinks

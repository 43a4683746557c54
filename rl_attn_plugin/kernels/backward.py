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
from rl_attn_plugin.kernels.forward import call_arguments, strides
from rl_attn_plugin.kernels.tiles import (
    DENSE,
    LOG2_E,
    UPCAST,
    bend,
    find_entry,
    first_position,
    lengths,
    load_rows,
    visible_keys,
)
from rl_attn_plugin.types import Layout, Options

_LENGTHS = ["kv_heads", "batch", "total", "seq_q", "seq_k", "tiles", "steps", "left", "right"]
_ROWS = 64  # rows of a program of the two row-wise kernels


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(
    Out, DOut, DLse, Delta, rows, out_b, out_t, out_h, out_d, dout_b, dout_t, dout_h, dout_d,
    dlse_b, dlse_h, dlse_t, lse_b, lse_h,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``delta = rowsum(out * dout) - dlse``, laid out as lse."""
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
    tl.store(Delta + b * lse_b + head * lse_h + t, delta, mask=inside)


@triton.jit(do_not_specialize=["batch", "rows"])
def sinks_kernel(Lse, Delta, Sinks, DSinks, batch, rows, lse_b, lse_h, ROWS: tl.constexpr):
    """``dsink = -sum(exp(sink - lse) * delta)`` of one head, in one order."""
    head = tl.program_id(0).to(tl.int64)
    sink = tl.load(Sinks + head).to(tl.float32) * LOG2_E
    total = tl.zeros([ROWS], tl.float32)
    Lse += head * lse_h
    Delta += head * lse_h
    for _ in range(batch):
        for t0 in range(0, rows, ROWS):
            t = t0 + tl.arange(0, ROWS)
            lse = tl.load(Lse + t, mask=t < rows, other=float("-inf")) * LOG2_E
            delta = tl.load(Delta + t, mask=t < rows, other=0.0)
            real = lse > float("-inf")  # padding and empty rows have no share
            share = tl.exp2(sink - tl.where(real, lse, 0.0))
            total += tl.where(real, share * delta, 0.0)
        Lse += lse_b
        Delta += lse_b
    tl.store(DSinks + head, (0.0 - tl.sum(total, 0)).to(DSinks.dtype.element_ty))


@triton.jit
def _gradient(scores, lse, dp, delta, seen, inner, scale_log2, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, FACTOR: tl.constexpr):  # fmt: skip
    """Probabilities and score gradients of a tile, from raw products; ``lse`` (base 2) and ``delta`` broadcast."""
    bent = bend(scores, inner, SOFTCAP, FACTOR)
    p = tl.exp2(tl.fma(bent, scale_log2, -lse))
    if MASKED:  # select after the exponential: it may overflow where nothing is seen
        p = tl.where(seen, p, 0.0)
    ds = p * (dp - delta)
    if SOFTCAP:
        ds = ds * tl.fma(-bent, bent, 1.0)
    if MASKED:
        ds = tl.where(seen, ds, 0.0)
    return p, ds


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
    dk, dv, k, v, Q, DOut, Lse, Delta, absolute, valid, begin, end, row, num_q, origin, head, left, right, inner,
    scale_log2, q_t, q_h, q_d, dout_t, dout_h, dout_d, lse_h,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    FACTOR: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what rows ``[begin, end)`` contribute to dk and dv. All products are formed transposed, keys first."""
    for r0 in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        rows = r0 + tl.arange(0, BLOCK_M)
        inside = rows < num_q * G
        query = rows // G
        heads = (head * G + rows % G).to(tl.int64)
        token = (row + query).to(tl.int64)
        line = heads * lse_h + token
        q = load_rows(Q, token * q_t + heads * q_h, q_d, inside, D, BLOCK_D, MASKED, k.dtype)
        dout = load_rows(DOut, token * dout_t + heads * dout_h, dout_d, inside, DV, BLOCK_DV, MASKED, k.dtype)
        if MASKED:
            lse = tl.load(Lse + line, mask=inside, other=0.0)
            delta = tl.load(Delta + line, mask=inside, other=0.0)
            lse = tl.where(lse > float("-inf"), lse, 0.0)
        else:
            lse = tl.load(Lse + line)
            delta = tl.load(Delta + line)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")
        dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
        seen = valid[:, None]
        if MASKED:
            seen = _visible((origin + query)[None, :], absolute[:, None], left, right, HAS_LEFT, HAS_RIGHT)
            seen = seen & valid[:, None] & inside[None, :]
        p, ds = _gradient(
            scores, (lse * LOG2_E)[None, :], dp, delta[None, :], seen, inner, scale_log2, MASKED, SOFTCAP, FACTOR
        )
        dv = tl.dot(p.to(k.dtype), dout, dv, input_precision="ieee")
        dk = tl.dot(ds.to(k.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=_LENGTHS)
def backward_kv_kernel(
    Q, K, V, DOut, Lse, Delta, DK, DV_, CuQ, CuK, UsedQ, UsedK, KvStart, Keep,
    scale, inner, scale_log2, kv_heads, batch, total, total_k, seq_q, seq_k, tiles, steps, left, right,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, dout_b, dout_t, dout_h, dout_d,
    dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, lse_b, lse_h, keep_b, keep_t,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MODE: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FACTOR: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one kv head."""
    per_head = tl.num_programs(0) // kv_heads
    head = tl.program_id(0) // per_head
    tile = tl.program_id(0) % per_head  # causal: the first keys have the most queries
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
    k = load_rows(K + batch_index * k_b + head64 * k_h, token * k_t, k_d, valid, D, BLOCK_D, True, compute)
    v = load_rows(V + batch_index * v_b + head64 * v_h, token * v_t, v_d, valid, DV, BLOCK_DV, True, compute)
    Q += batch_index * q_b
    DOut += batch_index * dout_b
    Lse += batch_index * lse_b
    Delta += batch_index * lse_b

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
    full_begin = tl.minimum(tl.maximum(tl.cdiv(full_low * G, BLOCK_M) * BLOCK_M, begin), tl.maximum(end, begin))
    full_end = tl.maximum(full_high * G // BLOCK_M * BLOCK_M, full_begin)
    full_end = tl.where(whole, full_end, full_begin)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    absolute = start + index
    dk, dv = _walk_queries(
        dk, dv, k, v, Q, DOut, Lse, Delta, absolute, valid, begin, full_begin, row, num_q, origin, head, left, right,
        inner, scale_log2, q_t, q_h, q_d, dout_t, dout_h, dout_d, lse_h,
        True, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, STAGES,
    )  # fmt: skip
    if Keep is None:
        dk, dv = _walk_queries(
            dk, dv, k, v, Q, DOut, Lse, Delta, absolute, valid, full_begin, full_end, row, num_q, origin, head, left,
            right, inner, scale_log2, q_t, q_h, q_d, dout_t, dout_h, dout_d, lse_h,
            False, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, STAGES,
        )  # fmt: skip
    dk, dv = _walk_queries(
        dk, dv, k, v, Q, DOut, Lse, Delta, absolute, valid, full_end, end, row, num_q, origin, head, left, right,
        inner, scale_log2, q_t, q_h, q_d, dout_t, dout_h, dout_d, lse_h,
        True, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, G, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, STAGES,
    )  # fmt: skip

    d = tl.arange(0, BLOCK_D)
    target = DK + batch_index * dk_b + head64 * dk_h + (token * dk_t)[:, None] + d[None, :]
    tl.store(target, (dk * scale).to(DK.dtype.element_ty), mask=stored[:, None] & (d < D)[None, :])
    d = tl.arange(0, BLOCK_DV)
    target = DV_ + batch_index * dv_b + head64 * dv_h + (token * dv_t)[:, None] + d[None, :]
    tl.store(target, dv.to(DV_.dtype.element_ty), mask=stored[:, None] & (d < DV)[None, :])


@triton.jit
def _walk_keys(
    dq, q, dout, lse, delta, K, V, Keep, position, begin, end, start, num_k, left, right, inner, scale_log2,
    k_t, k_d, v_t, v_d, keep_t,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    FACTOR: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what keys ``[begin, end)`` (relative to the sequence) contribute to dq."""
    for n0 in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        index = n0 + tl.arange(0, BLOCK_N)
        inside = index < num_k
        if MASKED and Keep is not None:
            inside = inside & (tl.load(Keep + index * keep_t, mask=inside, other=0) != 0)
        offset = index.to(tl.int64)
        k = load_rows(K, offset * k_t, k_d, inside, D, BLOCK_D, MASKED, q.dtype)
        v = load_rows(V, offset * v_t, v_d, inside, DV, BLOCK_DV, MASKED, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        seen = inside[None, :]
        if MASKED:
            seen = _visible(position[:, None], (start + index)[None, :], left, right, HAS_LEFT, HAS_RIGHT)
            seen = seen & inside[None, :]
        _, ds = _gradient(
            scores, lse[:, None], dp, delta[:, None], seen, inner, scale_log2, MASKED, SOFTCAP, FACTOR
        )
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=_LENGTHS)
def backward_q_kernel(
    Q, K, V, DOut, Lse, Delta, DQ, CuQ, CuK, UsedQ, UsedK, KvStart, Keep,
    scale, inner, scale_log2, kv_heads, batch, total, seq_q, seq_k, tiles, steps, left, right,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, dout_b, dout_t, dout_h, dout_d,
    dq_b, dq_t, dq_h, lse_b, lse_h, keep_b, keep_t,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MODE: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FACTOR: tl.constexpr,
    STAGES: tl.constexpr,
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
    full_begin = tl.minimum(tl.maximum(tl.cdiv(full_low - start, BLOCK_N) * BLOCK_N, begin), tl.maximum(end, begin))
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
    q = load_rows(Q + batch_index * q_b, token * q_t + heads * q_h, q_d, real, D, BLOCK_D, True, compute)
    dout = load_rows(
        DOut + batch_index * dout_b, token * dout_t + heads * dout_h, dout_d, real, DV, BLOCK_DV, True, compute
    )
    line = batch_index * lse_b + heads * lse_h + token
    lse = tl.load(Lse + line, mask=real, other=0.0)
    lse = tl.where(lse > float("-inf"), lse, 0.0) * LOG2_E
    delta = tl.load(Delta + line, mask=real, other=0.0)
    head64 = head.to(tl.int64)
    K += batch_index * k_b + head64 * k_h + key_row.to(tl.int64) * k_t
    V += batch_index * v_b + head64 * v_h + key_row.to(tl.int64) * v_t
    if Keep is not None:
        Keep += sequence * keep_b

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    position = origin + query
    if HAS_LEFT:
        dq = _walk_keys(
            dq, q, dout, lse, delta, K, V, Keep, position, begin, full_begin, start, num_k, left, right, inner,
            scale_log2, k_t, k_d, v_t, v_d, keep_t,
            True, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES,
        )  # fmt: skip
    if Keep is None:
        dq = _walk_keys(
            dq, q, dout, lse, delta, K, V, Keep, position, full_begin, full_end, start, num_k, left, right, inner,
            scale_log2, k_t, k_d, v_t, v_d, keep_t,
            False, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES,
        )  # fmt: skip
    dq = _walk_keys(
        dq, q, dout, lse, delta, K, V, Keep, position, full_end, end, start, num_k, left, right, inner, scale_log2,
        k_t, k_d, v_t, v_d, keep_t,
        True, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES,
    )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    target = DQ + batch_index * dq_b + (token * dq_t + heads * dq_h)[:, None] + d[None, :]
    tl.store(target, (dq * scale).to(DQ.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])


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
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    rows = q.shape[1] if dense else q.shape[0]
    arguments = call_arguments(q, k, v, out, lse, layout, options) | {
        "DOut": dout, "DLse": dlse, "Delta": delta, "DQ": dq, "DK": dk, "DV_": dv, "Sinks": sinks, "DSinks": dsinks,
        "scale": options.scale, "rows": rows, "total_k": k.shape[0], "ROWS": _ROWS,
        **strides("dout", dout, dense), **strides("dq", dq, dense), **strides("dk", dk, dense),
        **strides("dv", dv, dense),
    }  # fmt: skip
    if dlse is not None:
        arguments |= {"dlse_b": dlse.stride(0) if dense else 0, "dlse_h": dlse.stride(-2), "dlse_t": dlse.stride(-1)}
    else:
        arguments |= {"dlse_b": 0, "dlse_h": 0, "dlse_t": 0}

    def launch(kernel: triton.JITFunction, grid: tuple[int, ...], warps: int, stages: int, **more: int) -> None:
        given = arguments | more
        known = {name: given[name] for name in kernel.arg_names}
        kernel[grid](**known, num_warps=warps, num_stages=stages, enable_fp_fusion=False)

    launch(delta_kernel, (schedule.cdiv(rows, _ROWS), heads, batch if dense else 1), 4, 1)
    if sinks is not None:
        launch(sinks_kernel, (heads,), 4, 1, ROWS=1024, batch=batch if dense else 1)
    if k.numel() == 0:
        return dq.zero_(), dk, dv, dsinks

    for kernel, shape in zip(
        (backward_kv_kernel, backward_q_kernel), schedule.backward_tiles(q.dtype, dim, v_dim), strict=True
    ):
        on_keys = kernel is backward_kv_kernel
        size, length = (shape.keys, k.shape[1]) if on_keys else (shape.rows, q.shape[1] * heads // kv_heads)
        if dense:
            tiles = schedule.cdiv(length, size)
            programs, mode = tiles * batch, 0
        else:
            tiles, mode = 1, 2
            units = k.shape[0] if on_keys else q.shape[0] * heads // kv_heads
            programs = units // size + batch + 2
        launch(
            kernel, (programs * kv_heads,), shape.warps, shape.stages,
            BLOCK_M=shape.rows, BLOCK_N=shape.keys, STAGES=shape.stages, MODE=mode, tiles=tiles,
        )  # fmt: skip
    return dq, dk, dv, dsinks


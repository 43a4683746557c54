"""The forward: one kernel for dense, packed and paged keys, for prefill, chunks and decode."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_attn_plugin.kernels import schedule
from rl_attn_plugin.kernels.combine import combine_splits
from rl_attn_plugin.kernels.launch import launch
from rl_attn_plugin.kernels.rope import load_turned_rows, rope_arguments, turn
from rl_attn_plugin.kernels.tiles import (
    DENSE,
    DIRECT,
    EMPTY,
    INDEX_TENSORS,
    LN_2,
    LOG2_E,
    PLANNED,
    SEARCH,
    UPCAST,
    bend,
    find_entry,
    finish,
    first_position,
    lengths,
    load_rows,
    load_rows_transposed,
    merge_states,
    store_padding,
    visible_keys,
)
from rl_attn_plugin.types import Layout, Options, PagedPlan, Rope


@triton.jit
def _walk(
    M, L, A, m, l, acc, row_max, q, K, V, Table, Keep, position, begin, end, boundary, split, start, num_k, left,
    right, inner, scale_log2, k_page, k_t, k_d, v_page, v_t, v_d, keep_t,
    MASKED: tl.constexpr, GRID: tl.constexpr, SAME: tl.constexpr, WIDE: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FACTOR: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over the blocks of absolute keys ``[begin, end)``, merging states where a split begins.

    One loop crosses split boundaries, so that loads stay in flight over them. The masked and the unmasked
    form do the same arithmetic, the masked one with a select in it: a wholly visible block gives the same
    bits in both, a wholly masked one leaves the state untouched.
    """
    lane = tl.arange(0, BLOCK_N)
    for n0 in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        index = n0 - start + lane
        inside = index >= 0
        if MASKED:
            inside = inside & (index < num_k)
            if Keep is not None:
                inside = inside & (tl.load(Keep + index * keep_t, mask=inside, other=0) != 0)
        if PAGE > 0:
            # entries of the table past the last key stay unread, whatever they hold
            if MASKED:
                page = tl.load(Table + index // PAGE, mask=inside, other=0).to(tl.int64)
            else:
                page = tl.load(Table + index // PAGE).to(tl.int64)
            slot = (index % PAGE).to(tl.int64) if WIDE else index % PAGE
            k_offset = page * k_page + slot * k_t
            v_offset = k_offset if SAME else page * v_page + slot * v_t
        else:
            near = index.to(tl.int64) if WIDE else index
            k_offset = near * k_t
            v_offset = k_offset if SAME else near * v_t
        wide: tl.constexpr = WIDE or PAGE > 0
        k = load_rows_transposed(K, k_offset, k_d, inside, D, BLOCK_D, MASKED, wide, q.dtype)
        v = load_rows(V, v_offset, v_d, inside, DV, BLOCK_DV, MASKED, wide, q.dtype)
        scores = bend(tl.dot(q, k, input_precision="ieee"), inner, SOFTCAP, FACTOR)
        if MASKED:
            absolute = n0 + lane
            seen = inside[None, :] & (position == position)[:, None]
            if HAS_LEFT:
                seen = seen & (absolute[None, :] >= position[:, None] - left)
            if HAS_RIGHT:
                seen = seen & (absolute[None, :] <= position[:, None] + right)
            scores = tl.where(seen, scores, float("-inf"))
        peak = tl.max(scores, 1) * scale_log2
        if not GRID:
            if n0 == boundary:
                row_max = tl.maximum(row_max, m)
                M, L, A = merge_states(M, L, A, m, l, acc, 2)
                # EMPTY, written so that the branch needs this block's product: else the compiler moves it
                # before the product, which then waits for the accumulator of the block before
                m = tl.minimum(tl.maximum(peak, EMPTY), EMPTY)
                l = tl.zeros(l.shape, tl.float32)
                acc = tl.zeros(acc.shape, tl.float32)
                boundary += split
        top = tl.maximum(m, peak)
        p = tl.exp2(tl.fma(scores, scale_log2, -top[:, None]))
        alpha = tl.exp2(m - top)
        l = tl.fma(l, alpha, tl.sum(p, 1))
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m = top
    return M, L, A, m, l, acc, row_max, boundary


_LENGTHS = ["kv_heads", "batch", "total", "seq_q", "seq_k", "tiles", "steps", "left", "right", "split"]


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=INDEX_TENSORS)
def forward_kernel(
    Q, K, V, Out, Lse, RowMax, StateAcc, StateM, StateL, Sinks, KScale, VScale,
    CuQ, CuK, UsedQ, UsedK, KvStart, Table, Keep, Work, Cos, Sin, Places,
    inner, scale_log2, kv_heads, batch, total, seq_q, seq_k, tiles, steps, left, right, split,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, out_b, out_t, out_h, out_d, lse_b, lse_h,
    table_b, keep_b, keep_t, k_scale_h, v_scale_h, cos_p, cos_d, sin_p, sin_d, places_b, places_t,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    SAME: tl.constexpr, WIDE: tl.constexpr, MODE: tl.constexpr, GRID: tl.constexpr, HEAD_FAST: tl.constexpr,
    TOP_LEFT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FACTOR: tl.constexpr,
    STAGES: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one kv head, over all its splits, or over one of them (``GRID``)."""
    pid = tl.program_id(0)
    per_head = tl.num_programs(0) // kv_heads
    if HEAD_FAST:  # (always so with a plan) neighbours read neighbouring heads of the same keys
        head = pid % kv_heads
        tile = pid // kv_heads
    else:  # one head's keys stay in L2; tiles with the most keys start first
        head = pid // per_head
        tile = per_head - 1 - pid % per_head

    z = 0
    slot_base = 0
    if MODE == PLANNED:
        entry = tl.load(Work + tile * 4)
        z = tl.load(Work + tile * 4 + 2)
        slot_base = tl.load(Work + tile * 4 + 3)
        tile = tl.load(Work + tile * 4 + 1)
        if entry < 0:
            return
    elif MODE == SEARCH:
        entry, tile = find_entry(tile, CuQ, batch, total, steps, G, BLOCK_M)
    else:
        entry = tile // tiles
        tile = tile % tiles
    if GRID and MODE != PLANNED:
        z = tl.program_id(1)

    sequence, row, span, num_q, key_row, num_k, start = lengths(
        entry, CuQ, CuK, UsedQ, UsedK, KvStart, batch, total, seq_q, seq_k, MODE != DENSE
    )
    if MODE == DIRECT or MODE == PLANNED:  # noqa: SIM109 (not in Triton's language)
        if (entry == 0) | (entry == batch + 1):
            if not GRID:
                store_padding(
                    Out, Lse, RowMax, row, span, tile, tiles, head, out_t, out_h, out_d, lse_h,
                    RowMax is not None, G, DV, BLOCK_DV, BLOCK_M,
                )  # fmt: skip
            return
    if tile * BLOCK_M >= span * G:
        return

    origin = first_position(num_q, num_k, start, TOP_LEFT)
    first = origin + (tile * BLOCK_M) // G
    last = origin + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // G, num_q - 1)
    low, high, full_low, full_high = visible_keys(
        first, last, start, start + num_k, left, right, HAS_LEFT, HAS_RIGHT
    )
    if tile * BLOCK_M >= num_q * G:  # rows past the real length: nothing to attend to
        high = low
    if GRID:
        # slots count from the first split that the sequence's first query sees
        seq_low, _, _, _ = visible_keys(
            origin, origin, start, start + num_k, left, right, HAS_LEFT, HAS_RIGHT
        )
        s = seq_low // split + z
        if (high <= low) | (s < low // split) | (s * split >= high):
            return
        low = tl.maximum(low, s * split)
        high = tl.minimum(high, (s + 1) * split)
    begin = low // BLOCK_N * BLOCK_N
    full_begin = begin
    full_end = begin
    if Keep is None:
        full_begin = tl.minimum(
            tl.maximum(tl.cdiv(full_low, BLOCK_N) * BLOCK_N, begin), tl.maximum(high, begin)
        )
        full_end = tl.maximum(tl.minimum(full_high, high) // BLOCK_N * BLOCK_N, full_begin)

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = rows // G
    heads = (head * G + rows % G).to(tl.int64)
    real = query < num_q
    position = origin + query
    token = (row + query).to(tl.int64)
    sequence = sequence.to(tl.int64)
    batch_index = sequence if MODE == DENSE else 0 * sequence

    compute = tl.float32 if UPCAST else Q.dtype.element_ty
    if HALF:
        place = tl.load(Places + batch_index * places_b + token * places_t, mask=real, other=0)
        q = load_turned_rows(
            Q + batch_index * q_b, token * q_t + heads * q_h, q_d, real, place, Cos, Sin, cos_p, cos_d, sin_p, sin_d,
            HALF, D, BLOCK_D, INTERLEAVED, False,
        ).to(compute)  # fmt: skip
    else:
        q = load_rows(
            Q + batch_index * q_b, token * q_t + heads * q_h, q_d, real, D, BLOCK_D, True, True, compute
        )
    head64 = head.to(tl.int64)
    if PAGE > 0:  # the batch stride of a cache is that of its pages
        K += head64 * k_h
        V += head64 * v_h
        Table += sequence * table_b
    else:
        K += batch_index * k_b + head64 * k_h + key_row.to(tl.int64) * k_t
        V += batch_index * v_b + head64 * v_h + key_row.to(tl.int64) * v_t
    if Keep is not None:
        Keep += sequence * keep_b
    if KScale is not None:
        k_scale = tl.load(KScale + head64 * k_scale_h).to(tl.float32)
        if SOFTCAP:
            inner = inner * k_scale
        else:
            scale_log2 = scale_log2 * k_scale

    M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    L = tl.zeros([BLOCK_M], tl.float32)
    A = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if Sinks is not None and not GRID:
        M = tl.load(Sinks + heads).to(tl.float32) * LOG2_E
        L = tl.full([BLOCK_M], 1.0, tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)

    m = tl.full([BLOCK_M], EMPTY, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    boundary = (begin // split + 1) * split
    if Keep is not None or HAS_LEFT or KvStart is not None:
        M, L, A, m, l, acc, row_max, boundary = _walk(
            M, L, A, m, l, acc, row_max, q, K, V, Table, Keep, position, begin, full_begin, boundary, split, start,
            num_k, left, right, inner, scale_log2, k_b, k_t, k_d, v_b, v_t, v_d, keep_t,
            True, GRID, SAME, WIDE, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, PAGE, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
            STAGES,
        )  # fmt: skip
    if Keep is None:
        M, L, A, m, l, acc, row_max, boundary = _walk(
            M, L, A, m, l, acc, row_max, q, K, V, Table, Keep, position, full_begin, full_end, boundary, split, start,
            num_k, left, right, inner, scale_log2, k_b, k_t, k_d, v_b, v_t, v_d, keep_t,
            False, GRID, SAME, WIDE, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, PAGE, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
            STAGES,
        )  # fmt: skip
    M, L, A, m, l, acc, row_max, boundary = _walk(
        M, L, A, m, l, acc, row_max, q, K, V, Table, Keep, position, full_end, high, boundary, split, start,
        num_k, left, right, inner, scale_log2, k_b, k_t, k_d, v_b, v_t, v_d, keep_t,
        True, GRID, SAME, WIDE, HAS_LEFT, HAS_RIGHT, SOFTCAP, FACTOR, PAGE, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES,
    )  # fmt: skip
    if GRID:
        M = m
        L = l
        A = acc
    else:
        row_max = tl.maximum(row_max, m)
        M, L, A = merge_states(M, L, A, m, l, acc, 2)

    d = tl.arange(0, BLOCK_DV)
    if GRID:
        local = query.to(tl.int64) * (kv_heads * G) + heads
        if MODE == PLANNED:
            slot = slot_base + z.to(tl.int64) * num_q * (kv_heads * G) + local  # type: ignore[attr-defined]
        else:
            first_row = sequence * seq_q if MODE == DENSE else row.to(tl.int64)
            slot = (z.to(tl.int64) * total + first_row) * (kv_heads * G) + local  # type: ignore[attr-defined]
        target = slot[:, None] * DV + d[None, :]
        tl.store(StateAcc + target, A, mask=real[:, None] & (d < DV)[None, :])
        tl.store(StateM + slot, M, mask=real)
        tl.store(StateL + slot, L, mask=real)
    else:
        weight, lse = finish(M, L)
        if VScale is not None:
            weight = weight * tl.load(VScale + head64 * v_scale_h).to(tl.float32)
        out = tl.where(real[:, None], A * weight[:, None], 0.0).to(Out.dtype.element_ty)
        inside = query < span
        target = (token * out_t + heads * out_h)[:, None] + (d * out_d)[None, :]
        tl.store(Out + batch_index * out_b + target, out, mask=inside[:, None] & (d < DV)[None, :])
        line = batch_index * lse_b + heads * lse_h + token
        tl.store(Lse + line, tl.where(real, lse, float("-inf")), mask=inside)
        if RowMax is not None:
            row_max = tl.where(real & (row_max > EMPTY), row_max * LN_2, float("-inf"))
            tl.store(RowMax + line, row_max, mask=inside)


_NO_TUNING = schedule.Tuning()


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    options: Options,
    *,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
    plan: PagedPlan | None,
    rope: Rope | None = None,
    tuning: schedule.Tuning = _NO_TUNING,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention by the schedule; see `rl_attn_plugin.types` for the meaning of every argument.

    Args:
        q: ``[T, Hq, D]`` or ``[B, S, Hq, D]``, any strides.
        k: as q with Hkv heads, or a paged cache.
        v: as k, with Dv.
        layout: where sequences lie.
        options: what is computed.
        sinks: ``[Hq]`` or None.
        k_scale: scalar or ``[Hkv]`` for an e4m3 cache.
        v_scale: as k_scale.
        out: where to write, any strides, or None.
        plan: from `rl_attn_plugin.kernels.schedule.plan_paged`, or None.
        rope: rotate q as it is loaded, and k (but not a cache) before; resolved, see `contracts`.
        tuning: choices that do not change bits, for tests and benchmarks.

    Returns:
        ``out``, fp32 ``lse``, and fp32 ``max_logits`` ``[Hq]`` (``[0]`` unless asked for).
    """
    dense, paged = layout.cu_seqlens_q is None, layout.block_table is not None
    heads, dim = q.shape[-2:]
    kv_heads, v_dim = v.shape[-2:]
    group = heads // kv_heads
    batch = q.shape[0] if dense else layout.cu_seqlens_q.shape[0] - 1  # type: ignore[union-attr]
    total = q.shape[0] * q.shape[1] if dense else q.shape[0]
    if out is None:
        out = torch.empty(*q.shape[:-1], v_dim, dtype=options.out_dtype, device=q.device)
    lse_shape = (batch, heads, q.shape[1]) if dense else (heads, total)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    row_max = torch.empty_like(lse) if options.return_max_logits else None
    nothing = torch.empty(0, dtype=torch.float32, device=q.device)
    if total == 0 or batch == 0:
        out.zero_()
        lse.fill_(-math.inf)
        return out, lse, lse.new_full((heads,), -math.inf) if options.return_max_logits else nothing

    if rope is not None and not paged:
        k = turn(k, rope, rope.positions_k)
    shape = schedule.plan_launch(
        layout, batch=batch, total=total, group=group, kv_heads=kv_heads, dim=dim, v_dim=v_dim, dtype=q.dtype,
        window=(options.window_left, options.window_right), split=options.split_k, device=q.device, tuning=tuning,
    )  # fmt: skip
    arguments = call_arguments(q, k, v, out, lse, layout, options) | {
        "RowMax": row_max, "StateAcc": None, "StateM": None, "StateL": None, "Work": None,
        "Sinks": sinks, "KScale": k_scale, "VScale": v_scale,
        "k_scale_h": _head_stride(k_scale), "v_scale_h": _head_stride(v_scale),
        "Table": layout.block_table, "table_b": 0 if layout.block_table is None else layout.block_table.stride(0),
        "PAGE": k.shape[1] if paged else 0, "split": options.split_k, "tiles": shape.tiles,
        "BLOCK_M": shape.tile.rows, "BLOCK_N": options.block_k, "MODE": shape.mode, "GRID": False,
        "HEAD_FAST": False, "STAGES": shape.tile.stages,
        **rope_arguments(rope, None if rope is None else rope.positions),
    }  # fmt: skip
    warps, stages = shape.tile.warps, shape.tile.stages
    if plan is not None and plan.work is not None:
        _run_planned(arguments, plan, q, kv_heads, v_dim)
    elif shape.splits:
        arguments.update(_states(shape.splits * total * heads, v_dim, q.device))
        arguments.update({"GRID": True, "HEAD_FAST": True})
        launch(
            forward_kernel, (shape.programs * kv_heads, shape.splits), arguments, warps=warps, stages=stages
        )
        mode, tiles, programs = schedule.row_programs(layout, batch, total, group)
        combine_splits(arguments, mode, tiles, programs * kv_heads, shape.splits)
    else:
        arguments["HEAD_FAST"] = shape.tiles == 1 and shape.mode == DIRECT.value
        launch(forward_kernel, (shape.programs * kv_heads,), arguments, warps=warps, stages=stages)
    if row_max is None:
        return out, lse, nothing
    return out, lse, (row_max.amax((0, 2)) if dense else row_max.amax(1))


def _run_planned(
    arguments: dict[str, Any],
    plan: PagedPlan,
    q: Tensor,
    kv_heads: int,
    v_dim: int,
) -> None:
    """Whole tiles, then (tile, split) pairs and their merge, each from its section of the table."""
    assert plan.work is not None
    items = plan.work.shape[1]
    tile = schedule.decode_tile(q.dtype, q.shape[-1], v_dim)
    arguments.update(
        {
            "MODE": PLANNED.value, "HEAD_FAST": True, "tiles": 1, "Work": plan.work[0], "BLOCK_M": tile.rows,
            "STAGES": tile.stages,
        }
    )  # fmt: skip
    launch(forward_kernel, (items * kv_heads,), arguments, warps=tile.warps, stages=tile.stages)
    if plan.num_slots:
        arguments.update(_states(plan.num_slots, v_dim, q.device))
        arguments.update({"GRID": True, "Work": plan.work[1]})
        launch(forward_kernel, (items * kv_heads,), arguments, warps=tile.warps, stages=tile.stages)
        arguments["Work"] = plan.work[2]
        combine_splits(arguments, PLANNED.value, 1, items * kv_heads, 8)


def call_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, options: Options
) -> dict[str, Any]:
    """What forward and backward kernels are told alike, by name."""
    dense, paged = layout.cu_seqlens_q is None, layout.block_table is not None
    batch = q.shape[0] if dense else layout.cu_seqlens_q.shape[0] - 1  # type: ignore[union-attr]
    keep = layout.key_padding_mask
    scale_log2, inner, factor = _score_scale(options)
    return {
        "Q": q, "K": k, "V": v, "Out": out, "Lse": lse, "CuQ": layout.cu_seqlens_q, "CuK": layout.cu_seqlens_k,
        "UsedQ": layout.seqused_q, "UsedK": layout.seqused_k, "KvStart": layout.kv_start,
        "Keep": None if keep is None else keep.view(torch.uint8),
        "inner": inner, "scale_log2": scale_log2, "kv_heads": v.shape[-2], "batch": batch,
        "total": q.shape[0] * q.shape[1] if dense else q.shape[0],
        "seq_q": q.shape[1] if dense else 0, "seq_k": k.shape[1] if dense else 0,
        "steps": schedule.search_steps(batch),
        "left": min(options.window_left, 1 << 30), "right": min(options.window_right, 1 << 30),
        **strides("q", q, dense), **strides("k", k, dense or paged), **strides("v", v, dense or paged),
        **strides("out", out, dense), "lse_b": lse.stride(0) if dense else 0, "lse_h": lse.stride(-2),
        "keep_b": 0 if keep is None else keep.stride(0), "keep_t": 0 if keep is None else keep.stride(1),
        "G": q.shape[-2] // v.shape[-2], "D": q.shape[-1], "DV": v.shape[-1],
        "BLOCK_D": schedule.padded(q.shape[-1]), "BLOCK_DV": schedule.padded(v.shape[-1]),
        "TOP_LEFT": options.top_left, "HAS_LEFT": options.window_left >= 0, "HAS_RIGHT": options.window_right >= 0,
        "SOFTCAP": options.softcap != 0.0, "FACTOR": factor, "SAME": k.stride() == v.stride(),
        "WIDE": is_wide(q, layout.max_seqlen_q) or is_wide(k, layout.max_seqlen_k) or is_wide(v, layout.max_seqlen_k),
    }  # fmt: skip


def is_wide(x: Tensor, bound: int) -> bool:
    """Whether offsets inside one sequence (or page) may pass 2^31."""
    return min(bound, x.shape[-3]) * x.stride(-3) + x.shape[-1] * x.stride(-1) >= 1 << 31


def _score_scale(options: Options) -> tuple[float, float, int]:
    """``(scale_log2, inner, factor)``: base-2 scores are ``scale_log2 * bend(q @ k)``, scale_log2 positive."""
    if options.softcap:
        return options.softcap * math.log2(math.e), options.scale / options.softcap, 1
    if options.scale == 0:
        return 1.0, 0.0, 0
    return abs(options.scale) * math.log2(math.e), 0.0, 1 if options.scale > 0 else -1


def strides(name: str, x: Tensor, batched: bool) -> dict[str, int]:
    """Batch (or page), token, head and channel strides as kernel arguments."""
    strides = x.stride() if batched else (0, *x.stride())
    return {f"{name}_{axis}": s for axis, s in zip("bthd", strides, strict=True)}


def _head_stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(-1)


def _states(slots: int, v_dim: int, device: torch.device) -> dict[str, Tensor]:
    """Room for unnormalised partial states in one allocation."""
    room = torch.empty(slots * (v_dim + 2), dtype=torch.float32, device=device)
    acc, m, l = room.split((slots * v_dim, slots, slots))
    return {"StateAcc": acc, "StateM": m, "StateL": l}

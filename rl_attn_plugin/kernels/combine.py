"""Merging the partial states that a grid over splits left, in ascending order, with the schedule's formula."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from rl_attn_plugin.kernels.launch import launch
from rl_attn_plugin.kernels.tiles import (
    DENSE,
    DIRECT,
    EMPTY,
    INDEX_TENSORS,
    INTERPRET,
    LN_2,
    LOG2_E,
    PLANNED,
    SEARCH,
    find_entry,
    finish,
    first_position,
    lengths,
    merge_states,
    store_padding,
    visible_keys,
)


@triton.jit(
    do_not_specialize=[
        "kv_heads",
        "batch",
        "total",
        "seq_q",
        "seq_k",
        "tiles",
        "steps",
        "left",
        "right",
        "split",
    ],
    do_not_specialize_on_alignment=INDEX_TENSORS,
)
def combine_kernel(
    Out, Lse, RowMax, StateAcc, StateM, StateL, Sinks, VScale, CuQ, CuK, UsedQ, UsedK, KvStart, Work,
    kv_heads, batch, total, seq_q, seq_k, tiles, steps, left, right, split,
    out_b, out_t, out_h, out_d, lse_b, lse_h, v_scale_h,
    G: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, MODE: tl.constexpr,
    TOP_LEFT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One row of one query head: fold its splits, normalise, write."""
    pid = tl.program_id(0)
    head = pid % kv_heads
    r = pid // kv_heads
    slot_base = 0
    if MODE == PLANNED:
        entry = tl.load(Work + r * 4)
        slot_base = tl.load(Work + r * 4 + 3)
        r = tl.load(Work + r * 4 + 1)
        if entry < 0:
            return
    elif MODE == SEARCH:
        entry, r = find_entry(r, CuQ, batch, total, steps, G, 1)
    else:
        entry = r // tiles
        r = r % tiles
    sequence, row, span, num_q, _, num_k, start = lengths(
        entry, CuQ, CuK, UsedQ, UsedK, KvStart, batch, total, seq_q, seq_k, MODE != DENSE
    )
    if MODE == DIRECT:
        if (entry == 0) | (entry == batch + 1):
            store_padding(
                Out, Lse, RowMax, row, span, r, tiles, head, out_t, out_h, out_d, lse_h,
                RowMax is not None, G, DV, BLOCK_DV, 1,
            )  # fmt: skip
            return
    if r >= span * G:
        return

    query = r // G
    heads = (head * G + r % G).to(tl.int64)
    origin = first_position(num_q, num_k, start, TOP_LEFT)
    end = start + num_k
    seq_low, _, _, _ = visible_keys(origin, origin, start, end, left, right, HAS_LEFT, HAS_RIGHT)
    low, high, _, _ = visible_keys(
        origin + query, origin + query, start, end, left, right, HAS_LEFT, HAS_RIGHT
    )
    real = query < num_q
    base = seq_low // split
    z_first = low // split - base
    z_end = tl.where(real & (high > low), tl.cdiv(high, split) - base, z_first)

    sequence = sequence.to(tl.int64)
    batch_index = sequence if MODE == DENSE else 0 * sequence
    local = query.to(tl.int64) * (kv_heads * G) + heads
    if MODE == PLANNED:
        slot = slot_base + local
        step = num_q.to(tl.int64) * (kv_heads * G)
    else:
        first_row = sequence * seq_q if MODE == DENSE else row.to(tl.int64)
        slot = first_row * (kv_heads * G) + local
        step = total.to(tl.int64) * (kv_heads * G)

    d = tl.arange(0, BLOCK_DV)
    M = tl.full([1], float("-inf"), tl.float32)
    L = tl.zeros([1], tl.float32)
    if Sinks is not None:
        M = tl.load(Sinks + heads + tl.zeros([1], tl.int64)).to(tl.float32) * LOG2_E
        L = tl.full([1], 1.0, tl.float32)
    A = tl.zeros([1, BLOCK_DV], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    for z0 in tl.range(z_first, z_end, UNROLL, num_stages=1):
        for u in tl.static_range(UNROLL):
            z = z0 + u
            there = z < z_end
            at = slot + z.to(tl.int64) * step + tl.zeros([1], tl.int64)
            m = tl.load(StateM + at, mask=there, other=EMPTY)
            l = tl.load(StateL + at, mask=there, other=0.0)
            keep = (d < DV)[None, :] & there
            acc = tl.load(StateAcc + at[:, None] * DV + d[None, :], mask=keep, other=0.0)
            row_max = tl.maximum(row_max, m)
            M, L, A = merge_states(M, L, A, m, l, acc, 2)

    weight, lse = finish(M, L)
    if VScale is not None:
        weight = weight * tl.load(VScale + head.to(tl.int64) * v_scale_h).to(tl.float32)
    out = tl.where(real, A * weight[:, None], 0.0).to(Out.dtype.element_ty)
    token = (row + query).to(tl.int64)
    target = batch_index * out_b + token * out_t + heads * out_h
    tl.store(Out + target + (d * out_d)[None, :], out, mask=(d < DV)[None, :])
    line = batch_index * lse_b + heads * lse_h + token + tl.zeros([1], tl.int64)
    tl.store(Lse + line, tl.where(real, lse, float("-inf")))
    if RowMax is not None:
        tl.store(RowMax + line, tl.where(real & (row_max > EMPTY), row_max * LN_2, float("-inf")))


def combine_splits(arguments: dict[str, Any], mode: int, tiles: int, programs: int, splits: int) -> None:
    """Launch the merge over the rows of a forward.

    Args:
        arguments: of the forward kernel's launch, by name; the merge takes those it knows.
        mode: mapping of programs to rows.
        tiles: rows of an entry, where the mapping has a fixed number.
        programs: rows to launch, over all kv heads.
        splits: how many a row may have, about.
    """
    # States in flight; slots past the last one are empty states, which change nothing.
    unroll = 1 if INTERPRET else 16 if splits > 32 else 8 if splits > 4 else 4
    more = {"MODE": mode, "tiles": tiles, "UNROLL": unroll}
    launch(combine_kernel, (programs,), arguments | more, warps=1, stages=1)

"""Merge of normalised partial attentions ``(out, lse)`` over disjoint keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_attn_plugin.kernels import schedule
from rl_attn_plugin.kernels.launch import launch
from rl_attn_plugin.kernels.tiles import LN_2, LOG2_E

_ROWS = 16


@triton.jit(do_not_specialize=["parts", "rows"])
def merge_kernel(
    Outs, Lses, Out, Lse, parts, rows, outs_p, outs_b, outs_t, outs_h, outs_d, lses_p, lses_b, lses_h, lses_t,
    out_b, out_t, out_h, lse_b, lse_h, DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Fold the parts of some rows of one head in order, in fp32."""
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_DV)
    inside = t < rows
    keep = inside[:, None] & (d < DV)[None, :]
    Outs += b * outs_b + head * outs_h
    Lses += b * lses_b + head * lses_h
    running = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    level = tl.full([ROWS], float("-inf"), tl.float32)
    for _ in range(parts):
        part = tl.load(Outs + t[:, None] * outs_t + (d * outs_d)[None, :], mask=keep, other=0.0).to(
            tl.float32
        )
        lse = tl.load(Lses + t * lses_t, mask=inside, other=float("-inf"))
        # some libraries give an empty row +inf and a zero output
        empty = tl.max(tl.where(part == 0.0, 0, 1), 1) == 0
        lse = tl.where((lse == float("inf")) & empty, float("-inf"), lse)
        top = tl.maximum(level, lse)
        safe = tl.where(top == float("-inf"), 0.0, top)
        a = tl.exp2((level - safe) * LOG2_E)
        c = tl.exp2((lse - safe) * LOG2_E)
        total = a + c
        divisor = tl.where(total > 0.0, total, 1.0)
        merged = tl.fma(running, a[:, None], part * c[:, None]) / divisor[:, None]
        # log1p of the smaller weight, the other being 1: what 1 + x rounds away is put back as a factor
        x = tl.minimum(a, c)
        log1p = tl.log2(divisor) * LN_2 * (x / tl.where(divisor > 1.0, divisor - 1.0, 1.0))
        new = safe + tl.where(divisor > 1.0, log1p, x)
        # an empty side leaves the other exactly as it was
        first = level == float("-inf")
        skip = lse == float("-inf")
        running = tl.where(skip[:, None], running, tl.where(first[:, None], part, merged))
        level = tl.where(skip, level, tl.where(first, lse, new))
        Outs += outs_p
        Lses += lses_p
    target = Out + b * out_b + head * out_h + t[:, None] * out_t + d[None, :]
    tl.store(target, running.to(Out.dtype.element_ty), mask=keep)
    tl.store(Lse + b * lse_b + head * lse_h + t, level, mask=inside)


def merge_attention(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Fold partials in order along the first dimension.

    Args:
        outs: ``[P, T, Hq, D]`` or ``[P, B, S, Hq, D]``, any strides.
        lses: fp32 ``[P, Hq, T]`` or ``[P, B, Hq, S]``.

    Returns:
        ``out`` in ``outs``' dtype, rounded once, and fp32 ``lse``.
    """
    packed = outs.dim() == 4
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outs.device)
    views = [x.unsqueeze(axis) for x, axis in ((outs, 1), (lses, 1), (out, 0), (lse, 0))] if packed else [
        outs, lses, out, lse
    ]  # fmt: skip
    wide, levels, target, level = views
    parts, batch, rows, heads, dim = wide.shape
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf)
    arguments = {
        "Outs": outs, "Lses": lses, "Out": out, "Lse": lse, "parts": parts, "rows": rows,
        **dict(zip(("outs_p", "outs_b", "outs_t", "outs_h", "outs_d"), wide.stride(), strict=True)),
        **dict(zip(("lses_p", "lses_b", "lses_h", "lses_t"), levels.stride(), strict=True)),
        **dict(zip(("out_b", "out_t", "out_h"), target.stride()[:3], strict=True)),
        **dict(zip(("lse_b", "lse_h"), level.stride()[:2], strict=True)),
        "DV": dim, "BLOCK_DV": schedule.padded(dim), "ROWS": _ROWS,
    }  # fmt: skip
    launch(merge_kernel, (schedule.cdiv(rows, _ROWS), heads, batch), arguments, warps=4, stages=1)
    return out, lse

"""The backward of ``impl="torch"``: recomputes probabilities from ``lse``, one sequence at a time.

A sequence's gradients come from products whose shapes depend on that sequence alone, so they do not change
with what it is packed with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_attn_plugin.eager.rope import turn
from rl_attn_plugin.eager.sequences import Sequence, sequences
from rl_attn_plugin.types import Layout, Options, Rope

_QUERY_CHUNK = 512  # bounds the score matrix held at once


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
    """Gradients of ``(out, lse)`` with respect to q, k, v and sinks.

    With P = exp(s - lse): dv = P^T dout; ds = P * (dout v^T - delta), delta = rowsum(out * dout) - dlse
    (Dao, FlashAttention-2, section 2.2, and d lse / d s = P); dsink = -sum(exp(sink - lse) * delta).

    Args:
        dout: as ``out``, any strides.
        dlse: as ``lse`` or None.
        q: as in the forward; k, v too.
        out: the forward's result.
        lse: the forward's result.
        layout: of the forward, dense or packed.
        options: of the forward.
        sinks: ``[Hq]`` or None.
        rope: of the forward; q and k are not rotated yet.

    Returns:
        dq, dk, dv like q, k, v, and dsinks like sinks.
    """
    dense = layout.cu_seqlens_q is None
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if rope is not None:
        q, k = turn(q, rope, rope.positions), turn(k, rope, rope.positions_k)

    def rows(x: Tensor) -> Tensor:
        return x.reshape(-1, *x.shape[-2:])

    flat_lse = (lse.transpose(1, 2).reshape(-1, heads) if dense else lse.t()).float()
    delta = (rows(out).float() * rows(dout).float()).sum(-1)
    if dlse is not None:
        delta = delta - (dlse.transpose(1, 2).reshape(-1, heads) if dense else dlse.t()).float()
    dq, dk, dv = (torch.zeros(rows(x).shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    dsinks = None if sinks is None else torch.zeros(heads, dtype=torch.float32, device=q.device)
    for s in sequences(q, k, layout, options):
        queries = slice(s.q_row, s.q_row + s.num_q)
        keys = slice(s.k_row, s.k_row + s.num_k)
        if dsinks is not None and sinks is not None and s.num_q:
            share = torch.exp(sinks.float() - flat_lse[queries])
            dsinks -= (share * delta[queries]).sum(0)
        if not s.num_q or not s.num_k:
            continue
        # contiguous copies, so that no product sees strides that the packing decided
        key, value = (rows(x)[keys].float().transpose(0, 1).contiguous() for x in (k, v))
        keep = None if layout.key_padding_mask is None else layout.key_padding_mask[s.index, : s.num_k]
        for begin in range(0, s.num_q, _QUERY_CHUNK):
            chunk = slice(s.q_row + begin, min(s.q_row + begin + _QUERY_CHUNK, queries.stop))

            def grouped(x: Tensor, chunk: slice = chunk) -> Tensor:  # [n, Hq, X] -> [Hkv, G * n, X]
                picked = x[chunk].float().unflatten(1, (kv_heads, -1))
                return picked.permute(1, 2, 0, 3).flatten(1, 2).contiguous()

            query, grad = grouped(rows(q)), grouped(rows(dout))
            row_lse, row_delta = grouped(flat_lse[..., None]), grouped(delta[..., None])
            scores = torch.bmm(query, key.transpose(1, 2)) * options.scale
            slope: Tensor | float = 1.0
            if options.softcap:
                bent = torch.tanh(scores / options.softcap)
                scores, slope = bent * options.softcap, 1 - bent * bent
            seen = _visible(s, begin, chunk.stop - chunk.start, options, keep, q.device)
            seen = seen.repeat(heads // kv_heads, 1)
            p = torch.where(seen, torch.exp(scores - row_lse), 0.0)  # select: exp(-inf - -inf) is NaN
            ds = p * (torch.bmm(grad, value.transpose(1, 2)) - row_delta) * slope * options.scale
            ds = torch.where(seen, ds, 0.0)
            dv[keys] += torch.bmm(p.transpose(1, 2), grad).transpose(0, 1)
            dk[keys] += torch.bmm(ds.transpose(1, 2), query).transpose(0, 1)
            back = torch.bmm(ds, key).view(kv_heads, heads // kv_heads, -1, q.shape[-1])  # [Hkv, G, n, D]
            dq[chunk] = back.permute(2, 0, 1, 3).flatten(1, 2)
    dq, dk = dq.to(q.dtype).view(q.shape), dk.to(k.dtype).view(k.shape)
    if rope is not None:
        dq, dk = (turn(x, rope, at, inverse=True) for x, at in ((dq, rope.positions), (dk, rope.positions_k)))
    return (
        dq,
        dk,
        dv.to(v.dtype).view(v.shape),
        None if dsinks is None or sinks is None else dsinks.to(sinks.dtype),
    )


def _visible(
    s: Sequence, begin: int, count: int, options: Options, keep: Tensor | None, device: torch.device
) -> Tensor:
    """bool ``[count, num_k]`` for the queries from ``begin`` on."""
    p = s.first_position + begin + torch.arange(count, device=device)[:, None]
    c = s.kv_start + torch.arange(s.num_k, device=device)
    seen = torch.ones(count, s.num_k, dtype=torch.bool, device=device)
    if options.window_right >= 0:
        seen &= c <= p + options.window_right
    if options.window_left >= 0:
        seen &= c >= p - options.window_left
    return seen if keep is None else seen & keep

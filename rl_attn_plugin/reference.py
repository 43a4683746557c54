"""The oracle: attention of one sequence, written plainly, in fp32 or fp64, with autograd.

It materialises every score and shares no code with what it checks. Loop over sequences to check packed or
paged calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_attn_plugin.types import CausalAlignment


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    causal_alignment: CausalAlignment = "bottom_right",
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    keep: Tensor | None = None,
    kv_start: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence.

    Args:
        q: ``[Sq, Hq, D]``.
        k: ``[Sk, Hkv, D]``.
        v: ``[Sk, Hkv, Dv]``.
        causal: whether a query sees only keys up to its own position.
        causal_alignment: where the diagonal starts.
        scale: default ``D ** -0.5``.
        window: inclusive (left, right); -1 unlimited.
        softcap: ``s -> softcap * tanh(s / softcap)``; 0 is off.
        sinks: ``[Hq]`` extra logits without a value.
        keep: bool ``[Sk]``, False keys are hidden.
        kv_start: absolute index of the first key.
        dtype: of all arithmetic and of the result.

    Returns:
        ``out [Sq, Hq, Dv]`` and natural-log ``lse [Hq, Sq]``; a row that sees nothing gives 0 and
        ``-inf`` (its sink, where there is one).
    """
    num_q, heads, dim = q.shape
    num_k, kv_heads, _ = k.shape
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)

    seen = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device)
    for i in range(num_q):
        position = i if causal_alignment == "top_left" else kv_start + num_k - num_q + i
        columns = torch.arange(kv_start, kv_start + num_k, device=q.device)
        if causal:
            seen[i] &= columns <= position
        if window[0] >= 0:
            seen[i] &= columns >= position - window[0]
        if window[1] >= 0:
            seen[i] &= columns <= position + window[1]
    if keep is not None:
        seen = seen & keep

    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        extra = sinks.to(dtype)[:, None, None].expand(-1, num_q, 1)
        scores = torch.cat((scores, extra), dim=-1)
    # a finite stand-in keeps the gradient of empty rows at 0 instead of NaN
    empty = torch.isneginf(scores).all(-1) if scores.shape[-1] else scores.new_ones(scores.shape[:-1]).bool()
    safe = torch.where(empty[..., None], 0.0, scores)
    lse = (
        torch.where(empty, -torch.inf, torch.logsumexp(safe, dim=-1))
        if safe.shape[-1]
        else empty * -torch.inf
    )
    weights = torch.where(empty[..., None], 0.0, torch.exp(safe - torch.where(empty, 0.0, lse)[..., None]))
    out = torch.einsum("hqk,khd->qhd", weights[..., :num_k], v)
    return out, lse

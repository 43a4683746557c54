"""Merge of normalised partial attentions in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_attention(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Fold partials over disjoint keys into one, in order along the first dimension, in fp32.

    ``lse = max + log1p(exp(min - max))`` and outputs weighted by ``exp(l - lse)``. A ``-inf`` state leaves the
    other exactly as it was; ``+inf`` with a zero output, which some libraries give an empty row, is taken as
    ``-inf``.

    Args:
        outs: ``[P, T, Hq, D]`` or ``[P, B, S, Hq, D]``.
        lses: fp32 ``[P, Hq, T]`` or ``[P, B, Hq, S]``.

    Returns:
        ``out`` in ``outs``' dtype, rounded once, and fp32 ``lse``.
    """
    turned = lses.transpose(-1, -2)
    empty_as_inf = (turned == torch.inf) & (outs == 0).all(-1)
    turned = torch.where(empty_as_inf, -torch.inf, turned)
    out, lse = outs[0].float(), turned[0].float()
    out = torch.where((lse == -torch.inf)[..., None], 0.0, out)
    for part, part_lse in zip(outs[1:].float(), turned[1:].float(), strict=True):
        m = torch.maximum(lse, part_lse)
        safe = torch.where(m == -torch.inf, 0.0, m)
        a, b = torch.exp(lse - safe), torch.exp(part_lse - safe)
        total = a + b
        merged = (out * a[..., None] + part * b[..., None]) / total[..., None]
        merged_lse = safe + torch.log1p(torch.minimum(a, b))  # the other one is 1
        keep, take = (part_lse == -torch.inf), (lse == -torch.inf)
        out = torch.where(keep[..., None], out, torch.where(take[..., None], part, merged))
        lse = torch.where(keep, lse, torch.where(take, part_lse, merged_lse))
    return out.to(outs.dtype).contiguous(), lse.transpose(-1, -2).contiguous()

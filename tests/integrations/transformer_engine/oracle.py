"""What TransformerEngine's attention means, written plainly in fp64 for one sequence."""

from __future__ import annotations

import torch
from torch import Tensor

MASKS = [
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
]
SOFTMAX = ["vanilla", "off-by-one", "learnable"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: str,
    window: tuple[int, int] | None = None,
    sinks: Tensor | None = None,
    *,
    bottom_right: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``q [s, h, d]``, ``k`` and ``v [s, g, d]``: out ``[s, h, d]`` and lse ``[h, s]``; nothing visible gives 0 and -inf.

    ``causal`` is top-left and its ``bottom_right`` form says so itself; ``bottom_right`` places the windows of the others.
    """
    sq, sk = q.shape[0], k.shape[0]
    top_left = mask in ("causal", "padding_causal") or ("causal" not in mask and not bottom_right)
    diagonal = torch.arange(sq, device=q.device)[:, None] + (0 if top_left else sk - sq)
    ahead = torch.arange(sk, device=q.device)[None] - diagonal
    hidden = torch.zeros(sq, sk, dtype=torch.bool, device=q.device)
    if "causal" in mask:
        hidden |= ahead > 0
    if window is not None and window[0] >= 0:
        hidden |= (ahead < -window[0]) | (ahead > window[1])
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, sq, 1)), -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0, lse)[..., None])[..., :sk]
    return torch.einsum("hij,jhd->ihd", weights, v), lse


def batched(parts: list[Tensor], length: int, side: str = "right") -> Tensor:
    """Padded on one side, with NaN, which nothing may read."""
    out = torch.full(
        (len(parts), length, *parts[0].shape[1:]), torch.nan, dtype=parts[0].dtype, device=parts[0].device
    )
    for row, part in zip(out, parts, strict=True):
        n = part.shape[0]
        row[slice(0, n) if side == "right" else slice(length - n, length)] = part
    return out


def padding_masks(lengths: list[int], length: int, side: str = "right") -> Tensor:
    """``[b, 1, 1, s]``, True = masked out."""
    index, real = torch.arange(length), torch.tensor(lengths)[:, None]
    hidden = index >= real if side == "right" else index < length - real
    return hidden[:, None, None]


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()

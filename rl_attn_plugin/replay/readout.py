"""Log-probs read out of an attention output, so that its drift is in the unit that training sees."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_attn_plugin.replay.inputs import AttentionComparisonInputs

_CHUNK = (
    1024  # rows whose logits are held at once; the same for every path, so that equal rows give equal bits
)


def selected_logps(inputs: AttentionComparisonInputs, out: Tensor, rows: Tensor) -> Tensor | None:
    """fp32 log-softmax over the LM head of the target of each row, in nats; nothing is shifted.

    Args:
        inputs: with ``lm_head_weight`` and ``target_ids``.
        out: ``[N, Hq, Dv]``.
        rows: ``[N]``, where each row lies in ``[B * Sq]``.

    Returns:
        fp32 ``[N]``, or None without a readout.
    """
    if inputs.lm_head_weight is None or inputs.target_ids is None:
        return None
    weight = inputs.lm_head_weight.float().t()
    ids = (
        inputs.target_ids.flatten()[rows].long().clamp(0, weight.shape[1] - 1)
    )  # inactive ones may hold anything
    found = []
    for hidden, targets in zip(out.flatten(1).split(_CHUNK), ids.split(_CHUNK), strict=True):
        logits = hidden.float() @ weight
        found.append(torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0])
    return torch.cat(found) if found else out.new_empty(0, dtype=torch.float32)


def active_rows(inputs: AttentionComparisonInputs, rows: Tensor) -> Tensor | None:
    """Which of the rows count for dlogp; None is all."""
    return None if inputs.active_token_mask is None else inputs.active_token_mask.flatten()[rows]

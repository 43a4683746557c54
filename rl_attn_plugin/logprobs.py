"""The log-prob of a token, one function for trainer and rollout: two copies could round apart."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logps(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """fp32 log-prob of each token at a temperature, without truncation.

    Args:
        logits: ``[N, V]``, of any floating dtype.
        tokens: ``[N]``, int32 or int64.
        temperature: what the logits are divided by, in fp32.

    Returns:
        fp32 ``[N]``.
    """
    scaled = logits.float() / temperature
    return torch.log_softmax(scaled, dim=-1).gather(-1, tokens[:, None].long())[:, 0]

"""NeMo-RL, and loops like its own: a batch with both log-probs, handed over before the update."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_attn_plugin.monitor import DriftMonitor


def update_from_nemo_rl(monitor: DriftMonitor, train_data: Mapping[str, Tensor], *, step: int) -> None:
    """Takes in what ``grpo_train`` calls ``train_data``, once ``prev_logprobs`` are in it.

    Args:
        monitor: takes it.
        train_data: ``prev_logprobs``, ``generation_logprobs``, ``token_mask`` and ``input_ids``, all ``[B, S]`` with
            position t at the token t, and ``sample_mask [B]``.
        step: of the training.
    """
    mask = train_data["token_mask"] * train_data["sample_mask"][:, None]
    ids = train_data["input_ids"]
    monitor.update(
        train_data["prev_logprobs"],
        train_data["generation_logprobs"],
        mask,
        step=step,
        token_ids=ids,
        sequence_ids=torch.arange(ids.shape[0]),
    )

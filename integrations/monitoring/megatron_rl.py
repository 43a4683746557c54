"""Megatron-RL: the two places where it holds inference log-probs against the trainer's.

Its own statistics fill log-probs that inference did not return with the trainer's, which look like no drift. Here they
count as missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.integrations.monitoring.hook import DriftHook
from rl_attn_plugin.monitor import MISSING


def watch_megatron_rl(hook: DriftHook | None = None) -> DriftHook:
    """Lets ``megatron.rl`` monitor every batch that it prepares, and judge when it logs.

    Call it on every rank, after ``initialize_megatron`` and before training.

    Args:
        hook: monitor, rules and sinks; a plain one over the data-parallel ranks if None.

    Returns:
        The hook: ``hook.last`` is the judgement of the last step.

    Raises:
        ImportError: there is no ``megatron.rl``: it is part of Megatron-LM's repository, not of the package megatron-core.
    """
    try:
        from megatron.rl import rl_utils
    except ModuleNotFoundError as error:
        raise ImportError(
            f"watch_megatron_rl needs {error.name}, which is in Megatron-LM's repository: put that on PYTHONPATH"
        ) from error
    if hook is None:
        from megatron.core import parallel_state

        hook = DriftHook(group=parallel_state.get_data_parallel_group())
    align, packed = (
        rl_utils.align_unpacked_inference_logprobs,
        rl_utils.compute_packed_inference_logprobs_stats,
    )
    log = rl_utils.maybe_log_training_metrics

    def aligned(
        inference_logprobs: Sequence[Tensor],
        old_logprobs_for_data: Tensor,
        generation_masks: Tensor,
        group_stats: Any,
    ) -> Tensor:
        update_unpacked(hook, inference_logprobs, old_logprobs_for_data, generation_masks)
        found: Tensor = align(inference_logprobs, old_logprobs_for_data, generation_masks, group_stats)
        return found

    def packed_stats(
        old_logprobs: Tensor,
        packed_inference_logprobs: Tensor,
        packed_loss_mask: Tensor,
        group_stats: Any,
        filled_mask: Tensor | None = None,
    ) -> None:
        update_packed(hook, old_logprobs, packed_inference_logprobs, packed_loss_mask, filled_mask)
        packed(old_logprobs, packed_inference_logprobs, packed_loss_mask, group_stats, filled_mask)

    def logged(group_stats: Any, current_iteration: int, *args: Any, **options: Any) -> None:
        hook.end_step(current_iteration)
        log(group_stats, current_iteration, *args, **options)

    rl_utils.align_unpacked_inference_logprobs = aligned
    rl_utils.compute_packed_inference_logprobs_stats = packed_stats
    rl_utils.maybe_log_training_metrics = logged
    return hook


def update_unpacked(
    hook: DriftHook, inference: Sequence[Tensor], old: Tensor, generation_masks: Tensor
) -> None:
    """Takes in padded rows.

    Args:
        hook: takes them.
        inference: for each row the log-probs of its generated tokens, in order, ``[n]``; fewer than there are
            tokens where inference returned fewer.
        old: ``[B, S - 1]``, the trainer's; index p - 1 holds the token p.
        generation_masks: ``[B, >= S]``, bool, true at generated tokens.
    """
    mask = generation_masks[:, 1 : old.shape[1] + 1].bool().cpu()
    rollout = torch.full(old.shape, MISSING, dtype=torch.float32)
    for row, given in enumerate(inference):
        at = mask[row].nonzero()[:, 0]
        count = min(len(given), len(at))
        rollout[row, at[:count]] = given[:count].float().cpu()
    hook.monitor.update(
        old.cpu(), rollout, mask, step=hook.steps + 1, sequence_ids=torch.arange(old.shape[0])
    )


def update_packed(
    hook: DriftHook, old: Tensor, inference: Tensor, loss_mask: Tensor, filled: Tensor | None
) -> None:
    """Takes in packed bins. Which tokens are one sequence is not known here, so there are no numbers of sequences.

    Args:
        hook: takes them.
        old: ``[bins, S - 1]``, the trainer's; index p - 1 holds the token p.
        inference: likewise, 0 where inference returned none.
        loss_mask: ``[bins, S]``.
        filled: ``[bins, S - 1]``, bool, where inference returned one.
    """
    rollout = inference.float().cpu()
    if filled is not None:
        rollout = rollout.where(filled.cpu(), MISSING)
    mask = loss_mask[:, 1:].bool().cpu()
    hook.monitor.update(old.cpu().flatten(), rollout.flatten(), mask.flatten(), step=hook.steps + 1)

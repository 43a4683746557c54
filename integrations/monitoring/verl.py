"""verl: the numbers of ``calculate_debug_metrics``, and ours beside them."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rl_attn_plugin.integrations.monitoring.hook import DriftHook, named
from rl_attn_plugin.monitor import DriftMonitor

_HOMES = ("verl.utils.debug.metrics", "verl.trainer.ppo.v1.trainer_base")  # where the name is looked up


def watch_verl(hook: DriftHook | None = None) -> DriftHook:
    """Lets verl's trainer monitor each batch where it computes its own mismatch metrics, and log ours with them.

    Call it in the process that runs the trainer (the task runner), before ``fit()``. The rollout must return its log-probs:
    ``actor_rollout_ref.rollout.calculate_log_probs=True``.

    Args:
        hook: monitor, rules and sinks; plain ones if None.

    Returns:
        The hook: ``hook.last`` is the judgement of the last step.

    Raises:
        ImportError: verl is not installed.
    """
    try:
        import verl.utils.debug.metrics as home
    except ModuleNotFoundError as error:
        raise ImportError(f"watch_verl needs {error.name}: pip install verl") from error
    hook = hook if hook is not None else DriftHook()
    theirs = home.calculate_debug_metrics

    def both(data: Any) -> dict[str, Any]:
        update_from_verl(hook.monitor, data, step=hook.steps + 1)
        return {**theirs(data), **named(hook.end_step())}

    for name in _HOMES:
        if name in sys.modules and hasattr(sys.modules[name], "calculate_debug_metrics"):
            sys.modules[name].calculate_debug_metrics = both  # type: ignore[attr-defined]
    return hook


def update_from_verl(monitor: DriftMonitor, data: Any, *, step: int) -> None:
    """Takes a batch in.

    Args:
        monitor: takes it.
        data: a ``DataProto`` with ``old_log_probs``, ``response_mask`` and ``responses``, all ``[B, S]``; where
            ``rollout_log_probs`` is missing it is counted as missing.
        step: of the training.
    """
    batch = data.batch
    responses = batch["responses"]
    width = responses.shape[1]
    mask = batch["response_mask"] if "response_mask" in batch.keys() else batch["attention_mask"][:, -width:]  # noqa: SIM118
    rollout = batch["rollout_log_probs"] if "rollout_log_probs" in batch.keys() else None  # noqa: SIM118
    monitor.update(
        batch["old_log_probs"],
        rollout,
        mask,
        step=step,
        token_ids=responses,
        sequence_ids=torch.arange(responses.shape[0]),
    )

"""TRL's GRPO: every batch of completions is taken in as it is scored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.integrations.monitoring.hook import DriftHook, named


def watch_grpo(trainer: Any, hook: DriftHook | None = None) -> DriftHook:
    """Lets a ``GRPOTrainer`` monitor the log-probs of what it trains on; its numbers go to the trainer's own log.

    The rollout's log-probs are those of vLLM (``use_vllm=True``) or of a ``rollout_func``. The trainer's are the ones that
    TRL computes for importance sampling; where it computes none, a forward pass without gradients is added.

    Args:
        trainer: before ``train()``.
        hook: monitor, rules and sinks; plain ones if None. Its tokenizer becomes the trainer's where it has none.

    Returns:
        The hook: ``hook.last`` is the judgement of the last step.

    Raises:
        ValueError: the trainer samples with ``generate``, which gives no log-probs.
    """
    from transformers import TrainerCallback

    if not trainer.use_vllm and trainer.rollout_func is None:
        raise ValueError(
            "watch_grpo needs the rollout's log-probs, got a trainer that samples with generate(): set use_vllm=True, or "
            "give a rollout_func that returns 'logprobs'"
        )
    watching = hook if hook is not None else DriftHook()
    if watching.tokenizer is None:
        watching.tokenizer = trainer.processing_class
    score = trainer._generate_and_score_completions

    def scored(inputs: Any) -> Any:
        output = score(inputs)
        if trainer.model.training:
            _update(trainer, watching, output)
        return output

    class Step(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not watching.monitor.updated:
                return  # steps that train again on a batch that was judged
            judgement = watching.end_step(state.global_step)
            for name, value in named(judgement).items():
                trainer._metrics["train"][name].append(value)

    trainer._generate_and_score_completions = scored
    trainer.add_callback(Step())
    return watching


def _update(trainer: Any, hook: DriftHook, output: dict[str, Any]) -> None:
    mask = output["completion_mask"]
    if (tools := output.get("tool_mask")) is not None:
        mask = mask * tools
    rollout = output.get("sampling_per_token_logps")
    ids = output["completion_ids"]
    hook.monitor.update(
        _trainer_logps(trainer, output),
        rollout,
        mask,
        step=trainer.state.global_step + 1,
        token_ids=ids,
        sequence_ids=torch.arange(ids.shape[0]),
    )


def _trainer_logps(trainer: Any, output: dict[str, Any]) -> Tensor:
    found: Tensor | None = output.get("old_per_token_logps")
    if found is None:
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        with torch.no_grad():
            found = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                ids,
                mask,
                output["completion_ids"].shape[1],
                trainer.args.per_device_train_batch_size,
            )[0]
    return found

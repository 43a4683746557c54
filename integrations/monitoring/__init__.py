"""The drift monitor in training loops: TRL, verl, NeMo-RL's and Megatron-RL's, each in one line.

>>> from rl_attn_plugin.integrations.monitoring import watch_grpo
>>> hook = watch_grpo(trainer)
>>> trainer.train()
"""

from __future__ import annotations

from rl_attn_plugin.integrations.monitoring.hook import DriftHook
from rl_attn_plugin.integrations.monitoring.megatron_rl import watch_megatron_rl
from rl_attn_plugin.integrations.monitoring.nemo_rl import update_from_nemo_rl
from rl_attn_plugin.integrations.monitoring.trl import watch_grpo
from rl_attn_plugin.integrations.monitoring.verl import update_from_verl, watch_verl

__all__ = [
    "DriftHook",
    "update_from_nemo_rl",
    "update_from_verl",
    "watch_grpo",
    "watch_megatron_rl",
    "watch_verl",
]

"""vLLM: an out-of-tree attention backend, chosen with ``attention_backend="CUSTOM"``.

vLLM calls `register` in each of its processes, through the entry point ``vllm.general_plugins``.
"""

from __future__ import annotations

from rl_attn_plugin.integrations.vllm.plugin import register

__all__ = ["register"]

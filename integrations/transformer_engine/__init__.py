"""TransformerEngine's ``DotProductAttention`` by name, arguments and meaning, on the plugin's kernels.

TransformerEngine itself need not be installed.
"""

from __future__ import annotations

from rl_attn_plugin.integrations.transformer_engine.attention import DotProductAttention
from rl_attn_plugin.integrations.transformer_engine.swap import swap_attention

__all__ = ["DotProductAttention", "swap_attention"]

"""TransformerEngine's ``DotProductAttention`` by name, arguments and meaning, on the plugin's kernels.

TransformerEngine itself need not be installed.
"""

from __future__ import annotations

from rl_attn_plugin.integrations.transformer_engine.attention import DotProductAttention

__all__ = ["DotProductAttention"]

"""verl: the module that ``external_lib`` names, so that each worker knows ``attn_implementation="rl_attn"``.

verl imports it while it reads the model's configuration, before it loads the model. Importing it is all there is to do.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from rl_attn_plugin.integrations.transformers.attention import NAME, rl_attn_forward
from rl_attn_plugin.integrations.transformers.switch import register


def forward_in_verl(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`rl_attn_forward`, unless verl has cut the sequence over ranks.

    verl gathers such a sequence inside transformers' flash attention alone; any other would see its own piece and say
    nothing.

    Raises:
        NotImplementedError: under ``ulysses_sequence_parallel_size`` above 1.
    """
    ulysses = sys.modules.get("verl.utils.ulysses")
    ranks = 1 if ulysses is None else ulysses.get_ulysses_sequence_parallel_world_size()
    if ranks > 1:
        raise NotImplementedError(
            "attn_implementation='rl_attn' sees one rank's piece of the sequence under verl's Ulysses, got "
            f"ulysses_sequence_parallel_size={ranks}: set it to 1"
        )
    return rl_attn_forward(module, query, key, value, attention_mask, **options)


register()
AttentionInterface.register(NAME, forward_in_verl)

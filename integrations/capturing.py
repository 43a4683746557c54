"""One name for what any framework's model hands to its attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_attn_plugin.integrations.swapping import framework_of
from rl_attn_plugin.replay.inputs import AttentionComparisonInputs


def capture_attention_inputs(
    model: Any, tokens: Any, *, layers: Sequence[int] | None = None, folder: Path | str | None = None
) -> dict[str, AttentionComparisonInputs]:
    """q, k and v of chosen layers of a transformers or Megatron-core model, on given tokens.

    Args:
        model: of either framework.
        tokens: ids ``[B, S]``; for transformers ragged lists too.
        layers: indices, negative ones from the end; default the first, the middle and the last.
        folder: save them there too, for ``rl-attn compare FOLDER``.

    Returns:
        Inputs by label, ``layer-00`` and so on.

    Raises:
        ValueError: no tokens, or a layer that is not there.
        TypeError: a model of neither framework.
    """
    if framework_of(model, "capture_attention_inputs") == "transformers":
        from rl_attn_plugin.integrations.transformers.capture import (
            capture_attention_inputs as of_transformers,
        )

        return of_transformers(model, tokens, layers=layers, folder=folder)
    from rl_attn_plugin.integrations.megatron.capture import capture_attention_inputs as of_megatron

    return of_megatron(model, tokens, layers=layers, folder=folder)

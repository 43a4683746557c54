"""What a Megatron-core model hands to its core attention: q, k and v of chosen layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_attn_plugin.replay.captures import save_captures
from rl_attn_plugin.replay.inputs import AttentionComparisonInputs


def capture_attention_inputs(
    model: nn.Module, tokens: Tensor, *, layers: Sequence[int] | None = None, folder: Path | str | None = None
) -> dict[str, AttentionComparisonInputs]:
    """Run a GPT model once over whole sequences and keep what chosen layers hand to their core attention.

    Args:
        model: a Megatron-core ``GPTModel`` on one pipeline stage.
        tokens: ids ``[B, S]`` on the model's device.
        layers: indices on this stage, negative ones from the end; default the first, the middle and the last.
        folder: save them there too, for ``rl-attn compare FOLDER``.

    Returns:
        Inputs by label, ``layer-00`` and so on, on the model's device.

    Raises:
        ValueError: no tokens, or a layer that is not there.
    """
    if tokens.dim() != 2 or not tokens.numel():
        raise ValueError(f"tokens must be [B, S] with at least one token, got {list(tokens.shape)}")
    held = [getattr(module, "core_attention", None) for module in model.modules()]
    cores: list[Any] = [core for core in held if isinstance(core, nn.Module)]
    count = len(cores)
    chosen = sorted({0, count // 2, count - 1}) if layers is None else list(layers)
    wrong = [n for n in chosen if not -count <= n < count]
    if wrong or not chosen:
        raise ValueError(f"layers must be {-count} to {count - 1}, got {wrong or chosen}")
    seen: dict[str, AttentionComparisonInputs] = {}

    def note(label: str, core: Any, given: tuple[Tensor, ...]) -> None:
        q, k, v = (x.detach().transpose(0, 1).clone() for x in given[:3])
        window = getattr(core, "window", None) or getattr(core, "window_size", None) or (-1, -1)
        sinks = getattr(core, "softmax_offset", None)
        seen[label] = AttentionComparisonInputs(
            q, k, v, scale=getattr(core, "softmax_scale", None), window=(int(window[0]), int(window[1])),
            sinks=None if sinks is None else sinks.detach().clone(),
        )  # fmt: skip

    hooks = []
    for n in sorted({n % count for n in chosen}):
        label = f"layer-{n:02d}"
        hooks.append(
            cores[n].register_forward_pre_hook(lambda core, given, label=label: note(label, core, given))
        )
    try:
        with torch.no_grad():
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            model(tokens, positions, None)
    finally:
        for hook in hooks:
            hook.remove()
    if folder is not None:
        save_captures(folder, seen, {"architecture": type(model).__name__, "tokens": tokens.tolist()})
    return seen

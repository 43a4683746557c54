"""What a real model hands to its attention: q, k and v of chosen layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl_attn_plugin.replay.captures import save_captures
from rl_attn_plugin.replay.inputs import AttentionComparisonInputs


def capture_attention_inputs(
    model: PreTrainedModel,
    tokens: Sequence[Sequence[int]] | Tensor,
    *,
    layers: Sequence[int] | None = None,
    folder: Path | str | None = None,
) -> dict[str, AttentionComparisonInputs]:
    """Run the model once over whole sequences and keep what chosen layers hand to their attention.

    q and k are kept as the attention gets them, after norms and rotation. The model computes what it always
    does, by its own attention implementation.

    Args:
        model: a transformers model whose attention goes through ``ALL_ATTENTION_FUNCTIONS`` (not ``"eager"``).
        tokens: token ids, ``[B, S]`` or ragged; shorter sequences are padded on the right.
        layers: indices, negative ones from the end; default the first, the middle and the last.
        folder: save them there too, for ``rl-attn compare FOLDER``.

    Returns:
        Inputs by label, ``layer-00`` and so on, on the model's device.

    Raises:
        ValueError: no tokens, a layer that is not there, or a model whose attention cannot be watched.
    """
    rows = [list(map(int, row)) for row in tokens]
    if not rows or not all(rows):
        raise ValueError(
            f"tokens must hold at least one token a sequence, got lengths {[len(r) for r in rows]}"
        )
    count = int(model.config.get_text_config().num_hidden_layers)
    chosen = sorted({0, count // 2, count - 1}) if layers is None else list(layers)
    wrong = [n for n in chosen if not -count <= n < count]
    if wrong or not chosen:
        raise ValueError(f"layers must be {-count} to {count - 1}, got {wrong or chosen}")
    wanted = {n % count for n in chosen}

    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=model.device)
    keep = torch.tensor([[n < len(row) for n in range(longest)] for row in rows], device=model.device)
    seen: dict[int, AttentionComparisonInputs] = {}
    with torch.no_grad(), _watched(model, wanted, keep, seen):
        model(input_ids=ids, attention_mask=keep.long(), use_cache=False)
    missing = sorted(wanted - seen.keys())
    if missing:
        raise ValueError(
            f"layers {missing} of {type(model).__name__} never called an attention function: "
            "they are of another kind"
        )
    found = {f"layer-{n:02d}": seen[n] for n in sorted(seen)}
    if folder is not None:
        source = {
            "model": str(model.config._name_or_path),
            "architecture": type(model).__name__,
            "attn_implementation": str(model.config._attn_implementation),
            "tokens": rows,
        }
        save_captures(folder, found, source)
    return found


@contextmanager
def _watched(
    model: PreTrainedModel, wanted: set[int], keep: Tensor, seen: dict[int, AttentionComparisonInputs]
) -> Iterator[None]:
    """Put a function that notes its arguments in front of the model's attention function."""
    name = model.config._attn_implementation
    if name == "eager" or name not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"the model's attention must be one that transformers looks up by name, got {name!r}: "
            "use attn_implementation='sdpa' or 'rl_attn'"
        )
    attend = ALL_ATTENTION_FUNCTIONS[name]
    overridden = name in ALL_ATTENTION_FUNCTIONS._local_mapping
    mask = None if bool(keep.all()) else keep

    def note(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> Any:
        layer = getattr(module, "layer_idx", None)
        if layer in wanted and layer not in seen:
            causal = options.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            window = options.get("sliding_window")
            reach = -1 if window is None else window - 1
            sinks = options.get("s_aux")
            q, k, v = (x.detach().transpose(1, 2).clone() for x in (query, key, value))
            seen[layer] = AttentionComparisonInputs(
                q,
                k,
                v,
                causal=causal,
                scale=options.get("scaling"),
                key_padding_mask=mask,
                window=(reach, -1 if causal else reach),
                softcap=options.get("softcap") or 0.0,
                sinks=None if sinks is None else sinks.detach().clone(),
            )
        return attend(module, query, key, value, attention_mask, **options)

    ALL_ATTENTION_FUNCTIONS[name] = note
    try:
        yield
    finally:
        if overridden:
            ALL_ATTENTION_FUNCTIONS[name] = attend
        else:
            del ALL_ATTENTION_FUNCTIONS[name]

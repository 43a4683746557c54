"""Explicit masks for transformers' own attention, made from positions.

Models differ in what they pass on when they make masks themselves (some forget ``position_ids`` and let
packed sequences see each other; all count padding columns into a sliding window). A mask given whole is used
as is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


def masks_from_positions(
    model: PreTrainedModel, attention: str, q: Tensor, k: Tensor, same_sequence: Tensor | None = None
) -> Tensor | dict[str, Tensor]:
    """What each query sees: ``[B, 1, Sq, Sk]``, by layer type where the model has two.

    Args:
        model: for its windows, layer types and dtype.
        attention: ``"sdpa"`` takes a bool mask, ``"eager"`` adds one.
        q: ``[B, Sq]`` position of each query in its sequence, -1 for padding; the queries are the last keys.
        k: ``[B, Sk]`` position of each key, -1 for padding.
        same_sequence: bool ``[B, Sq, Sk]`` for packed rows.

    Raises:
        NotImplementedError: for layer types that are neither full nor sliding attention.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    q_at, k_at = q[:, None, :, None], k[:, None, None, :]
    full = (k_at >= 0) & (k_at <= q_at)
    if same_sequence is not None:
        full = full & same_sequence[:, None]
    # a padding query sees its own column, which no real query sees: a row of nothing would be NaN
    columns = torch.arange(k.shape[1], device=k.device)
    padding = (q_at < 0) & (columns == columns[k.shape[1] - q.shape[1] :, None])

    def usable(seen: Tensor) -> Tensor:
        seen = seen | padding
        if attention == "sdpa":
            return seen
        return torch.where(seen, 0.0, torch.finfo(model.dtype).min).to(model.dtype)

    masks = {"full_attention": usable(full)}
    if window is not None:
        masks["sliding_attention"] = usable(full & (k_at > q_at - window))
    everywhere = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(config, "layer_types", None) or [everywhere])
    if not kinds <= masks.keys():
        raise NotImplementedError(
            f"native scoring knows full and sliding attention, got a model with layers of {sorted(kinds)}"
        )
    return {kind: masks[kind] for kind in kinds} if len(kinds) > 1 else masks[kinds.pop()]

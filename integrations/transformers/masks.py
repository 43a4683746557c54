"""The mask that transformers makes for ``rl_attn``: offsets and lengths instead of a matrix.

A registered attention without a registered mask gets no mask at all and is silently not causal, so the two
are registered together. What travels from the model to its layers as ``attention_mask`` is one of

* None: every row holds real tokens only, and the diagonal is bottom-right;
* an int32 table ``[B, 1, 1, 5]``, one line a row: first real query, real queries, first real key, real keys,
  absolute index of that key. Padding on either side becomes offsets and lengths, which keeps the bits of the
  unpadded call. Four dimensions, because transformers hands such a mask on untouched;
* a bool ``[B, 1, 1, Sk]``, True = keep, for masks with holes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

COLUMNS = ("first_query", "num_queries", "first_key", "num_keys", "key_start")

# What may stand in a mask function: all of it is rebuilt from causality, window and packed positions.
_UNDERSTOOD = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "and_masks.",
    "sliding_window_overlay.",
    "sliding_window_bidirectional_overlay.",
    "packed_sequence_mask_function.",
    "remap_positions_for_packed_sequence.",
    "padding_mask_function.",
    "add_offsets_to_mask_function.",
)


def rl_attn_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor | None:
    """The mask function registered as ``rl_attn``; see the module for what it returns.

    Args:
        batch_size: B.
        q_length: queries of this forward.
        kv_length: keys the layers will see, unwritten slots of a static cache included.
        q_offset: padded index of the first query; a tensor with a static cache.
        kv_offset: padded index of the first key.
        mask_function: what the model asks for; checked to be something this attention does.
        attention_mask: bool ``[B, n]`` over padded indices, True = real.
        device: of the result.

    Raises:
        NotImplementedError: when the model asks for another pattern (chunked, block-wise, custom).
    """
    for name in _parts(mask_function):
        if not name.startswith(_UNDERSTOOD):
            raise NotImplementedError(
                f"attn_implementation='rl_attn' computes causal, sliding-window, packed and padded "
                f"attention, got a mask made of {name.split('.')[0]}: use another attn_implementation"
            )
    end = q_offset + q_length
    if attention_mask is None:
        plain = not isinstance(q_offset, Tensor) and kv_offset == 0 and kv_length == end
        if plain:
            return None
        starts: Tensor | int = 0
        ends: Tensor | int = end
    else:
        mask = attention_mask.bool()
        if bool(mask.all()) and kv_offset == 0 and not isinstance(q_offset, Tensor) and kv_length == end:
            return None
        index = torch.arange(mask.shape[1], device=mask.device)
        counts = mask.sum(-1)
        starts = torch.where(counts > 0, mask.int().argmax(-1), mask.shape[1])
        ends = torch.where(counts > 0, torch.where(mask, index, -1).amax(-1) + 1, mask.shape[1])
        if not bool((ends - starts == counts).all()):
            return _holes(mask, kv_length, kv_offset)
    first = torch.zeros(batch_size, dtype=torch.int64, device=device)
    starts, ends = first + starts, torch.minimum(first + ends, first + end)
    ends = torch.maximum(starts, ends)

    def clamp(position: Tensor, offset: int | Tensor, length: int) -> Tensor:
        return (position - offset).clamp(0, length)

    first_query, last_query = clamp(starts, q_offset, q_length), clamp(ends, q_offset, q_length)
    first_key, last_key = clamp(starts, kv_offset, kv_length), clamp(ends, kv_offset, kv_length)
    key_start = (kv_offset - starts).clamp(min=0)
    columns = (first_query, last_query - first_query, first_key, last_key - first_key, key_start)
    return torch.stack(columns, dim=-1).int()[:, None, None]


def _holes(mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """``[B, 1, 1, Sk]`` of the keys at hand; slots past the mask are unwritten."""
    keep = mask[:, kv_offset : kv_offset + kv_length]
    missing = kv_length - keep.shape[1]
    return torch.nn.functional.pad(keep, (0, missing))[:, None, None]


def _parts(function: Callable[..., Any] | None) -> Iterator[str]:
    """Qualified names of the functions that a mask function is composed of."""
    if function is None:
        return
    yield getattr(function, "__qualname__", type(function).__qualname__)
    for cell in getattr(function, "__closure__", None) or ():
        inside = cell.cell_contents
        for item in inside if isinstance(inside, tuple) else (inside,):
            if callable(item) and not isinstance(item, Tensor):
                yield from _parts(item)

"""The mask that transformers makes for ``rl_attn``: offsets and lengths instead of a matrix.

A registered attention without a registered mask gets no mask at all and is silently not causal, so the two
are registered together. What travels from the model to its layers as ``attention_mask`` is one of

* None: every row holds real tokens only, and the diagonal is bottom-right;
* an empty int32 ``[B, 1, n, 0]``: the same, with a window;
* an int32 table ``[B, 1, n, 5]``, one line a row: first real query, real queries, first real key, real keys,
  absolute index of that key. Padding on either side becomes offsets and lengths, which keeps the bits of the
  unpadded call;
* uint8 ``[B, 1, n, Sk]``, 1 = keep, for masks with holes; keys past Sk are unwritten.

They have four dimensions, because transformers hands such a mask on untouched, and the third (expanded, so it
costs nothing) tells the window, which some layers do not: ``n - 2`` keys of reach, or none at ``n = 1``. A size is
on the host, where a value would have to be fetched.

Padding queries give 0, but for masks with holes and for attention that is bidirectional without a window: there they
attend to the real keys, as with sdpa.
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
    local_size: int | None = None,
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
        local_size: the model's sliding window.

    Raises:
        NotImplementedError: when the model asks for another pattern (chunked, block-wise, custom).
    """
    parts = list(_parts(mask_function))
    for name in parts:
        if not name.startswith(_UNDERSTOOD):
            raise NotImplementedError(
                f"attn_implementation='rl_attn' computes causal, sliding-window, packed and padded "
                f"attention, got a mask made of {name.split('.')[0]}: use another attn_implementation"
            )
    reach = _reach(parts, local_size)
    bidirectional = any("bidirectional" in name for name in parts)
    # The keys of an encoder need not be the queries' own: all of them count, and so do all queries.
    all_queries = bidirectional and reach is None
    end = kv_offset + kv_length if bidirectional else q_offset + q_length
    mask = None if attention_mask is None else attention_mask.bool()
    if (
        not isinstance(end, Tensor)
        and kv_offset == 0
        and kv_length == end
        and (reach is None or not bidirectional or kv_length == q_length)
        and (mask is None or bool(mask.all()))
    ):
        nothing = torch.empty(batch_size, 0, dtype=torch.int32, device=device)
        return None if reach is None or reach + 1 >= kv_length else _with_reach(nothing, reach)
    starts: Tensor | int = 0
    ends: Tensor | int = end
    if mask is not None:
        index = torch.arange(mask.shape[1], device=mask.device)
        counts = mask.sum(-1)
        starts = torch.where(counts > 0, mask.int().argmax(-1), mask.shape[1])
        ends = torch.where(counts > 0, torch.where(mask, index, -1).amax(-1) + 1, mask.shape[1])
        if not bool((ends - starts == counts).all()):
            return _with_reach(_holes(mask, int(end), kv_offset), reach)
    zeros = torch.zeros(batch_size, dtype=torch.int64, device=device)
    starts, ends = zeros + starts, torch.minimum(zeros + ends, zeros + end)
    ends = torch.maximum(starts, ends)

    def clamp(position: Tensor, offset: int | Tensor, length: int) -> Tensor:
        return (position - offset).clamp(0, length)

    first_query, last_query = clamp(starts, q_offset, q_length), clamp(ends, q_offset, q_length)
    if all_queries:
        first_query, last_query = zeros, zeros + q_length
    first_key, last_key = clamp(starts, kv_offset, kv_length), clamp(ends, kv_offset, kv_length)
    key_start = (kv_offset - starts).clamp(min=0)
    columns = (first_query, last_query - first_query, first_key, last_key - first_key, key_start)
    return _with_reach(torch.stack(columns, dim=-1).int(), reach)


def _holes(mask: Tensor, end: int, kv_offset: int) -> Tensor:
    """``[B, written keys]``; the slots of a static cache that nothing was written to are cut off."""
    keep = mask[:, kv_offset:end]
    return torch.nn.functional.pad(keep, (0, end - kv_offset - keep.shape[1])).to(torch.uint8)


def _with_reach(rows: Tensor, reach: int | None) -> Tensor:
    return rows[:, None, None].expand(-1, -1, 1 if reach is None else reach + 2, -1)


def reach_of(mask: Tensor) -> int | None:
    """How many keys a query sees beside its own, from the shape of a mask made here."""
    return None if mask.shape[2] == 1 else mask.shape[2] - 2


def _reach(parts: list[str], local_size: int | None) -> int | None:
    """transformers' causal windows count the query's own key, its bidirectional ones do not."""
    if local_size is None:
        return None
    if any(name.startswith("sliding_window_bidirectional_overlay.") for name in parts):
        return local_size
    return local_size - 1 if any(name.startswith("sliding_window_overlay.") for name in parts) else None


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

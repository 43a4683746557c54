"""Rollout batches: one small interface over the paged plugin path and over transformers' own path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rl_attn_plugin.integrations.transformers.attention import NAME
from rl_attn_plugin.integrations.transformers.native_masks import masks_from_positions
from rl_attn_plugin.integrations.transformers.paged import PagedCache, cache_argument, paged_forward
from rl_attn_plugin.integrations.transformers.switch import attention_implementation


class PagedSession:
    """Rows ``0 .. rows - 1`` over a paged cache, packed batches, ``rl_attn``."""

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        *,
        num_pages: int,
        page_size: int = 16,
        page_order: Iterable[int] | None = None,
    ) -> None:
        """Open an empty batch.

        Args:
            model: a causal language model.
            rows: sequences.
            num_pages: pages of the cache, for all rows together.
            page_size: tokens a page.
            page_order: see `PagedCache`.
        """
        layers = model.config.get_text_config().num_hidden_layers
        self._model = model
        self._cache = PagedCache(layers, num_pages, page_size, page_order=page_order)
        for row in range(rows):
            self._cache.add(row)

    def feed(self, tokens: Mapping[int, Sequence[int]], keep: Mapping[int, int]) -> dict[int, Tensor]:
        """Append tokens to rows; see `paged_forward`."""
        with attention_implementation(self._model, NAME):
            return paged_forward(self._model, self._cache, tokens, keep)

    def close_rows(self, rows: Sequence[int]) -> None:
        """Free finished rows; they are never fed again."""
        for row in rows:
            self._cache.free(row)


class NativeSession:
    """The same rows transformers' own way: one padded batch over a `DynamicCache`.

    Rows of different lengths share columns: a feed appends as many columns as its longest row brings, and
    shorter rows end in padding columns. Positions count real tokens alone, and the masks are made from
    positions, so that neither causality nor a sliding window sees the padding.
    """

    def __init__(self, model: PreTrainedModel, rows: int, *, attn_implementation: str = "sdpa") -> None:
        """Open an empty batch.

        Args:
            model: a causal language model.
            rows: sequences.
            attn_implementation: ``"sdpa"`` or ``"eager"``.
        """
        self._model, self._name = model, attn_implementation
        self._rows = list(range(rows))  # row of each line of the cache
        self._lengths = dict.fromkeys(range(rows), 0)
        self._cache = DynamicCache()  # no config: a layer with a window would drop columns by their number
        self._key_positions = torch.zeros(rows, 0, dtype=torch.int64, device=model.device)  # -1: padding

    def feed(self, tokens: Mapping[int, Sequence[int]], keep: Mapping[int, int]) -> dict[int, Tensor]:
        """Append tokens to rows; rows left out wait behind padding.

        Args:
            tokens: new tokens of each row, at least one a row.
            keep: of how many of a row's last new tokens to return logits.

        Returns:
            For each kept row, fp32 logits ``[keep, V]``: entry i predicts what follows that token.

        Raises:
            ValueError: for rows that are not open or bring nothing.
        """
        for row, new in tokens.items():
            if row not in self._rows or not new:
                raise ValueError(f"row {row} must be one of {self._rows} and bring tokens, got {list(new)}")
        width, device = max(map(len, tokens.values())), self._model.device
        ids = torch.zeros(len(self._rows), width, dtype=torch.int64)
        positions = torch.full_like(ids, -1)
        for line, row in enumerate(self._rows):
            new, start = tokens.get(row, ()), self._lengths[row]
            ids[line, : len(new)] = torch.tensor(new, dtype=torch.int64)
            positions[line, : len(new)] = torch.arange(start, start + len(new))
            self._lengths[row] += len(new)
        positions = positions.to(device)
        self._key_positions = torch.cat((self._key_positions, positions), dim=1)
        columns = sorted({c for r, n in keep.items() for c in range(len(tokens[r]) - n, len(tokens[r]))})
        with torch.no_grad(), attention_implementation(self._model, self._name):
            logits = self._model(
                input_ids=ids.to(device),
                attention_mask=masks_from_positions(self._model, self._name, positions, self._key_positions),
                position_ids=positions.clamp(min=0),
                **{cache_argument(self._model): self._cache},
                use_cache=True,
                logits_to_keep=torch.tensor(columns, dtype=torch.int64, device=device),
            ).logits
        result = {}
        for row, count in keep.items():
            if count:
                wanted = [columns.index(c) for c in range(len(tokens[row]) - count, len(tokens[row]))]
                result[row] = logits[self._rows.index(row), wanted].float()
        return result

    def close_rows(self, rows: Sequence[int]) -> None:
        """Take finished rows out of the batch; they are never fed again."""
        lines = [line for line, row in enumerate(self._rows) if row not in rows]
        self._rows = [self._rows[line] for line in lines]
        index = torch.tensor(lines, dtype=torch.int64, device=self._model.device)
        self._key_positions = self._key_positions[index]
        if lines and self._key_positions.shape[1]:
            self._cache.batch_select_indices(index)

"""The transformers policy: one model, both arms of attention.

The native arm is what transformers does by itself: sdpa, a `DynamicCache`, padded batches. The plugin arm runs the same
model with ``attn_implementation="rl_attn"``: packed batches over a paged cache. The weights are loaded once; an arm is
switched to by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.integrations import transformers as plugin
from rl_attn_plugin.launch.config import Fault
from rl_attn_plugin.launch.policies.base import PolicyIdentity, PolicySpec, Session

ATTENTION = {"native": "sdpa", "plugin": "rl_attn"}


class NativeSession:
    """Padded batches over a `DynamicCache`.

    A feed appends as many columns as its longest row needs; shorter rows are padded on the right there, so their
    sequence has holes, which the attention mask hides and the position ids skip. Padding never precedes a row's first
    token, so no query is left without a key.
    """

    def __init__(self, model: Any, rows: int) -> None:
        from transformers import DynamicCache

        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._rows = list(range(rows))
        self._mask = torch.zeros(rows, 0, dtype=torch.long)
        self._lengths = dict.fromkeys(self._rows, 0)

    def feed(self, tokens: Mapping[int, Sequence[int]], keep: Mapping[int, int]) -> dict[int, Tensor]:
        """See `Session.feed`."""
        width = max(map(len, tokens.values()))
        ids = torch.zeros(len(self._rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        positions = torch.zeros_like(ids)
        for line, row in enumerate(self._rows):
            new = tokens.get(row, ())
            ids[line, : len(new)] = torch.tensor(new, dtype=torch.long)
            mask[line, : len(new)] = 1
            positions[line, : len(new)] = torch.arange(len(new)) + self._lengths[row]
            self._lengths[row] += len(new)
        self._mask = torch.cat([self._mask, mask], dim=1)
        wanted = {row: range(len(tokens[row]) - count, len(tokens[row])) for row, count in keep.items() if count}
        columns = sorted({column for columns in wanted.values() for column in columns}) or [width - 1]
        device = self._model.device
        logits = self._model(
            input_ids=ids.to(device),
            attention_mask=self._mask.to(device),
            position_ids=positions.to(device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(columns, device=device),
        ).logits
        place = {column: i for i, column in enumerate(columns)}
        return {
            row: logits[self._rows.index(row), [place[column] for column in chosen]].float()
            for row, chosen in wanted.items()
        }

    def close_rows(self, rows: Sequence[int]) -> None:
        """See `Session.close_rows`."""
        stay = [line for line, row in enumerate(self._rows) if row not in rows]
        self._rows = [self._rows[line] for line in stay]
        self._mask = self._mask[stay]
        self._cache.batch_select_indices(torch.tensor(stay, device=self._model.device))

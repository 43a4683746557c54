"""A paged cache that holds the batch: pages in random places, NaN wherever no key lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_attn_plugin.ops.cache import write_kv_cache
from rl_attn_plugin.replay.packing import Packed
from rl_attn_plugin.types import Impl

_SPARE = 3  # pages that nobody owns


@dataclass(frozen=True, slots=True)
class Pages:
    """Caches ``[num_pages, page_size, Hkv, D]`` and the table that finds each sequence's pages.

    Attributes:
        k: keys.
        v: values.
        table: int32 ``[B, max_pages]``; entries past a sequence's pages name no page.
        k_scale: ``[Hkv]`` of an e4m3 cache, value = stored * scale.
        v_scale: as ``k_scale``.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def size(self) -> int:
        return self.k.shape[1]

    def slots(self, sequence: int, begin: int, end: int) -> Tensor:
        """Slots of a sequence's keys ``[begin, end)``."""
        at = torch.arange(begin, end, device=self.k.device)
        return self.table[sequence, at // self.size].long() * self.size + at % self.size


def make_pages(
    packed: Packed, page_size: int, *, seed: int, table: Tensor | None = None, float8: bool = False
) -> Pages:
    """An empty cache with room for the batch.

    Args:
        packed: the batch.
        page_size: tokens of a page.
        seed: of the placement.
        table: pages to use instead of random ones.
        float8: store e4m3, with a scale a head that maps its largest magnitude to e4m3's largest, 448.
    """
    device = packed.device
    if table is None:
        counts = [-(-n // page_size) for n in packed.keys]
        order = torch.randperm(sum(counts) + _SPARE, generator=torch.Generator().manual_seed(seed))
        table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for b, (row, count) in enumerate(zip(order.split([*counts, _SPARE]), counts, strict=False)):
            table[b, :count] = row.int()
        table = table.to(device)
        pages = sum(counts) + _SPARE
    else:
        pages = int(table.max()) + 1
    dtype = torch.float8_e4m3fn if float8 else packed.k.dtype
    k, v = (
        torch.full((pages, page_size, *x.shape[1:]), torch.nan, device=device).to(dtype)
        for x in (packed.k, packed.v)
    )
    scales = (_scale(packed.k), _scale(packed.v)) if float8 else (None, None)
    return Pages(k, v, table, *scales)


def fill(pages: Pages, packed: Packed, impl: Impl) -> None:
    """Write every key and value to its slot."""
    slots = torch.cat([pages.slots(b, 0, n) for b, n in enumerate(packed.keys)])
    write_kv_cache(
        packed.k, packed.v, pages.k, pages.v, slots, k_scale=pages.k_scale, v_scale=pages.v_scale, impl=impl
    )


def _scale(x: Tensor) -> Tensor:
    largest = x.abs().amax((0, 2)).float() if x.shape[0] else x.new_ones(x.shape[1]).float()
    return torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)

"""A host-side view of a call: which rows and keys each sequence owns, and how to gather its keys."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rl_attn_plugin.types import Layout, Options


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence of a call, in host integers.

    Attributes:
        index: its place in the batch.
        q_row: row of its first query in the flattened ``[rows, Hq, D]`` view of q.
        k_row: row of its first key in the flattened view of k (unused when paged).
        num_q: real queries.
        num_k: real keys.
        kv_start: absolute index of its first key.
        first_position: absolute position of its first query (negative when Sq > Sk, bottom-right).
    """

    index: int
    q_row: int
    k_row: int
    num_q: int
    num_k: int
    kv_start: int
    first_position: int


def _ints(tensor: Tensor | None, default: list[int]) -> list[int]:
    return default if tensor is None else tensor.tolist()


def sequences(q: Tensor, k: Tensor, layout: Layout, options: Options) -> list[Sequence]:
    """Read the layout to the host. On CUDA this synchronises, which only this implementation may do."""
    if layout.cu_seqlens_q is None:
        batch, dense_q, dense_k = q.shape[0], q.shape[1], k.shape[1]
        q_rows = [b * dense_q for b in range(batch)]
        k_rows = [b * dense_k for b in range(batch)]
        num_q, num_k = [dense_q] * batch, [dense_k] * batch
    else:
        cu_q = layout.cu_seqlens_q.tolist()
        batch = len(cu_q) - 1
        q_rows, num_q = cu_q[:-1], [b - a for a, b in pairwise(cu_q)]
        if layout.cu_seqlens_k is None:
            k_rows, num_k = [0] * batch, [0] * batch
        else:
            cu_k = layout.cu_seqlens_k.tolist()
            k_rows, num_k = cu_k[:-1], [b - a for a, b in pairwise(cu_k)]
    num_q = _ints(layout.seqused_q, num_q)
    num_k = _ints(layout.seqused_k, num_k)
    starts = _ints(layout.kv_start, [0] * batch)
    return [
        Sequence(
            index=b,
            q_row=q_rows[b],
            k_row=k_rows[b],
            num_q=num_q[b],
            num_k=num_k[b],
            kv_start=starts[b],
            first_position=0 if options.top_left else starts[b] + num_k[b] - num_q[b],
        )
        for b in range(batch)
    ]


class KeyGather:
    """Reads keys and values of a group of sequences at absolute positions, in blocks, as fp32."""

    def __init__(
        self, group: list[Sequence], positions: Tensor, block_k: int, layout: Layout, page_size: int
    ) -> None:
        """Index once for a range of positions.

        Args:
            group: the sequences, in the order of the gathered result.
            positions: int64 ``[L]`` absolute key positions, a whole number of blocks.
            block_k: keys a block.
            layout: of the call.
            page_size: of a paged call.
        """
        device = positions.device

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, device=device, dtype=torch.int64)[:, None]

        relative = positions[None, :] - column([s.kv_start for s in group])
        valid = (relative >= 0) & (relative < column([s.num_k for s in group]))
        safe = torch.where(valid, relative, 0)
        members = column([s.index for s in group])
        self._shape = (len(group), len(positions) // block_k, block_k)
        self._pages: tuple[Tensor, Tensor] | None = None
        if layout.block_table is not None:
            # an invalid slot reads page 0 of the cache, never what its table entry happens to hold
            page = torch.where(valid, layout.block_table[members, safe // page_size], 0).long()
            self._pages = page, safe % page_size
            self._rows = page * page_size + safe % page_size
        else:
            # a sequence without keys has no row of its own: read row 0
            self._rows = torch.where(valid, safe + column([s.k_row for s in group]), 0)
        self.visible = valid  # [n, L]
        if layout.key_padding_mask is not None:
            self.visible = valid & layout.key_padding_mask[members, safe]

    def blocks(self, source: Tensor, scale: Tensor | None, *, zero_invisible: bool) -> Tensor:
        """fp32 ``[n, Hkv, blocks, block_k, D]``, contiguous.

        Args:
            source: ``[rows, Hkv, D]``, or ``[num_pages, page_size, Hkv, D]``.
            scale: of an e4m3 cache.
            zero_invisible: zero what no row may use. Values need it, since 0 * NaN is NaN and an unused slot
                may hold anything; a key's NaN stays in the one score that the mask replaces.
        """
        heads, dim = source.shape[-2:]
        dtype = source.dtype
        if dtype == torch.float8_e4m3fn:  # CPU cannot index or fill float8; its zero is the zero byte
            source = source.view(torch.uint8)
        if self._pages is not None and source.stride(0) != source.shape[1] * source.stride(1):
            picked = source[self._pages]  # pages that are no view of one row after another
        elif source.shape[0] == 0:
            picked = source.new_zeros(*self._rows.shape, heads, dim)
        else:  # rows copy much faster than pairs of indices
            rows = source if self._pages is None else source.flatten(0, 1)
            picked = rows.index_select(0, self._rows.flatten()).view(*self._rows.shape, heads, dim)
        if zero_invisible:
            unused = (~self.visible).flatten().nonzero()[:, 0]
            picked.view(-1, heads * dim).index_fill_(0, unused, 0)
        turned = picked.view(dtype).view(*self._shape, heads, dim).permute(0, 3, 1, 2, 4)
        result = torch.empty(turned.shape, dtype=torch.float32, device=source.device).copy_(turned)
        return result if scale is None else result.mul_(scale.float().reshape(-1, 1, 1, 1))

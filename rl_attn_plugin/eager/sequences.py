"""A host-side view of a call: which rows and keys each sequence owns, and how to gather its keys."""

from __future__ import annotations

from dataclasses import dataclass

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
        q_rows, num_q = cu_q[:-1], [b - a for a, b in zip(cu_q, cu_q[1:], strict=False)]
        if layout.cu_seqlens_k is None:
            k_rows, num_k = [0] * batch, [0] * batch
        else:
            cu_k = layout.cu_seqlens_k.tolist()
            k_rows, num_k = cu_k[:-1], [b - a for a, b in zip(cu_k, cu_k[1:], strict=False)]
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
    """Reads keys or values of a group of sequences at absolute positions, as fp32, invalid ones zeroed."""

    def __init__(self, group: list[Sequence], positions: Tensor, layout: Layout, paged: bool) -> None:
        """Index once for a range of positions.

        Args:
            group: the sequences, in the order of the gathered result.
            positions: int64 ``[L]`` absolute key positions.
            layout: of the call.
            paged: whether keys lie in pages.
        """
        device = positions.device

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, device=device, dtype=torch.int64)[:, None]

        relative = positions[None, :] - column([s.kv_start for s in group])
        self.valid = (relative >= 0) & (relative < column([s.num_k for s in group]))
        safe = torch.where(self.valid, relative, 0)
        self._paged = layout.block_table if paged else None
        self._safe = safe
        self._group = column([s.index for s in group])
        if not paged:
            self._rows = safe + column([s.k_row for s in group])
        if layout.key_padding_mask is not None:
            keep = layout.key_padding_mask[self._group, safe]
            self.visible = self.valid & keep
        else:
            self.visible = self.valid

    def read(self, source: Tensor, start: int, stop: int, scale: Tensor | None) -> Tensor:
        """fp32 ``[len(group), Hkv, stop - start, D]`` of the positions ``[start, stop)`` of the range."""
        if self._paged is not None:
            size = source.shape[1]
            safe = self._safe[:, start:stop]
            # an invalid slot reads page 0 of the cache, never what its table entry happens to hold
            page = torch.where(self.valid[:, start:stop], self._paged[self._group, safe // size], 0)
            block = source[page.long(), safe % size]
        else:
            block = source[self._rows[:, start:stop]]
        block = block.float()
        if scale is not None:
            block = block * scale.reshape(-1, 1)
        # select, never multiply: an unused slot may hold NaN
        block = torch.where(self.visible[:, start:stop, None, None], block, 0.0)
        return block.transpose(1, 2)

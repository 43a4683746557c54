"""The batch as packed sequences: padding is left out, never computed and masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rl_attn_plugin.replay.inputs import AttentionComparisonInputs


def offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32 ``[B + 1]``."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def ints(values: Sequence[int], device: torch.device) -> Tensor:
    """int32 ``[B]``."""
    return torch.tensor(list(values), dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Packed:
    """The kept tokens of every sequence, one after the other.

    Attributes:
        q: ``[Tq, Hq, D]``.
        k: ``[Tk, Hkv, D]``.
        v: ``[Tk, Hkv, Dv]``.
        queries: tokens of each sequence in q.
        keys: tokens of each sequence in k and v; queries are the last of them.
        rows: ``[Tq]``, where each row of q lies in ``[B * Sq]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    rows: Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def cu_q(self) -> Tensor:
        return offsets(self.queries, self.device)

    @property
    def cu_k(self) -> Tensor:
        return offsets(self.keys, self.device)

    @property
    def sequences(self) -> list[tuple[slice, slice]]:
        """Rows of q, and of k and v, of each sequence."""
        q = [0, *accumulate(self.queries)]
        k = [0, *accumulate(self.keys)]
        return [(slice(q[b], q[b + 1]), slice(k[b], k[b + 1])) for b in range(len(self.queries))]


def pack(inputs: AttentionComparisonInputs, q: Tensor, k: Tensor) -> Packed:
    """Pack ``q`` and ``k`` (those of ``inputs``, or rotated) and v."""
    batch, num_q = q.shape[:2]
    num_k = k.shape[1]
    mask = inputs.key_padding_mask
    if mask is None:
        rows = torch.arange(batch * num_q, device=q.device)
        return Packed(
            q.flatten(0, 1), k.flatten(0, 1), inputs.v.flatten(0, 1), (num_q,) * batch, (num_k,) * batch, rows
        )
    kept = tuple(int(n) for n in mask.sum(1))
    rows = mask.flatten().nonzero()[:, 0]
    flat_q, flat_k, flat_v = (x.flatten(0, 1)[rows] for x in (q, k, inputs.v))
    return Packed(flat_q, flat_k, flat_v, kept, kept, rows)

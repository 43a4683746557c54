"""Small tensors that many tests build."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def ints(*values: int, device: str = "cpu") -> Tensor:
    """An int32 tensor, as offsets, lengths and tables are."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(lengths: list[int]) -> Tensor:
    """``cu_seqlens`` of sequences without gaps."""
    return ints(*itertools.accumulate(lengths, initial=0))

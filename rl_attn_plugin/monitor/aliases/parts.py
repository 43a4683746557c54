"""What several frameworks do alike: cut a batch into micro-batches or ranks, and average with a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

Numbers = dict[str, float]


def parts(rows: int | None, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Micro-batches, or what each rank has, of ``rows`` rows; the whole batch for None."""
    yield from zip(*(x.split(rows or max(1, x.shape[0])) for x in tensors), strict=True)


def mean_of_parts(metrics: Callable[..., Numbers], rows: int | None, *tensors: Tensor) -> Numbers:
    """Each metric averaged over parts, whatever their numbers of tokens; those that a part lacks over the others."""
    found = [metrics(*part) for part in parts(rows, *tensors)]
    keys = dict.fromkeys(key for part in found for key in part)
    values = {key: [part[key] for part in found if key in part] for key in keys}
    return {key: sum(value) / len(value) for key, value in values.items()}


def multiplied_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean by multiplying with the mask: a NaN that is masked out comes through."""
    return (x * mask).sum(dim) / mask.sum(dim)

"""From what a trainer holds, padded or packed, to one flat list of tokens with their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rl_attn_plugin.monitor.settings import Settings
from rl_attn_plugin.monitor.validity import count, judge_values, missing_like, reads_freely

_CHUNK = 1 << 16  # tokens at once on a CPU: the temporaries stay in its cache


class Batch(NamedTuple):
    """One update as handed over: padded ``[B, S]`` or packed ``[T]``, on one device.

    Attributes:
        trainer: float.
        rollout: float.
        mask: bool or number, nonzero where a token is to be compared.
        token_ids: int64, or None.
        positions: int64, or None.
        sequence_ids: int64, or None.
        groups: int64 by name; the groups of the settings, those that were given.
    """

    trainer: Tensor
    rollout: Tensor
    mask: Tensor
    token_ids: Tensor | None
    positions: Tensor | None
    sequence_ids: Tensor | None
    groups: dict[str, Tensor]

    def chunks(self) -> Iterator[Batch]:
        """Parts of whole rows; one part where rows are not sequences or memory is not a cache's, and none without a
        position."""
        if self.mask.numel() == 0:
            return
        if self.mask.ndim == 1 or not reads_freely(self.mask) or self.mask.numel() <= _CHUNK:
            yield self
            return
        rows = max(1, _CHUNK // max(1, self.mask.shape[1]))
        for start in range(0, self.mask.shape[0], rows):
            part = slice(start, start + rows)
            yield Batch(
                trainer=self.trainer[part],
                rollout=self.rollout[part],
                mask=self.mask[part],
                token_ids=None if self.token_ids is None else self.token_ids[part],
                positions=None if self.positions is None else self.positions[part],
                sequence_ids=None if self.sequence_ids is None else self.sequence_ids[part],
                groups={name: labels[part] for name, labels in self.groups.items()},
            )


class Tokens(NamedTuple):
    """The tokens of one update, flat, with or without those that the mask leaves out. Everything ``[T]``.

    Attributes:
        given_trainer: float, as handed over.
        given_rollout: likewise.
        trainer: fp64 log-probs; finite stand-ins where not compared.
        rollout: likewise.
        d: fp64, their difference; 0 where not compared.
        active: bool, the mask.
        compared: bool, active and valid on both sides.
        invalid: int64 scalars by kind.
        rank: int64, how many active tokens there are before it.
        previous: int64, index of the active token before this one in its sequence, or -1; None where the sequences
            are not known.
        segment: int64, sequence of each active token, from 0; None likewise.
        first: bool, the first active token of its sequence; None likewise.
        position: int64, None where not known.
        token_id: int64, None where not given.
        sequence_id: int64, None where not given.
        groups: int64 by name.
    """

    given_trainer: Tensor
    given_rollout: Tensor
    trainer: Tensor
    rollout: Tensor
    d: Tensor
    active: Tensor
    compared: Tensor
    invalid: dict[str, Tensor]
    rank: Tensor
    previous: Tensor | None
    segment: Tensor | None
    first: Tensor | None
    position: Tensor | None
    token_id: Tensor | None
    sequence_id: Tensor | None
    groups: dict[str, Tensor]


def batch_of(
    logp_trainer: Tensor | None,
    logp_rollout: Tensor | None,
    mask: Tensor,
    token_ids: Tensor | None,
    positions: Tensor | None,
    sequence_ids: Tensor | None,
    groups: Mapping[str, Tensor],
    settings: Settings,
) -> Batch:
    """Checks what does not depend on data, and moves everything to the trainer's device.

    Raises:
        ValueError: a tensor that describes the tokens has another shape, or a group was not declared.
    """
    given = logp_trainer if logp_trainer is not None else logp_rollout
    like = given if given is not None else mask
    device, shape = like.device, tuple(mask.shape)
    if mask.ndim not in (1, 2):
        raise ValueError(f"tokens must be padded [B, S] or packed [T], got {list(shape)}")
    for name, side in (("logp_trainer", logp_trainer), ("logp_rollout", logp_rollout)):
        if side is not None and not side.is_floating_point():
            raise ValueError(f"{name} must hold floating-point numbers, got {side.dtype}")
    unknown = sorted(groups.keys() - settings.groups.keys())
    if unknown:
        raise ValueError(f"groups must be declared when the monitor is made, got {', '.join(unknown)}")

    def place(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x.detach().to(device, torch.int64, non_blocking=True)
        if tuple(x.shape) != shape:
            if x.ndim != 1 or mask.ndim != 2 or x.shape[0] != shape[0]:
                raise ValueError(
                    f"{name} must have the shape of the mask, {list(shape)}, got {list(x.shape)}"
                )
            x = x[:, None].expand(shape)
        return x

    def side_of(x: Tensor | None) -> Tensor:
        return missing_like(mask).to(device) if x is None else x.detach().to(device, non_blocking=True)

    return Batch(
        side_of(logp_trainer),
        side_of(logp_rollout),
        mask.detach().to(device, non_blocking=True),
        place("token_ids", token_ids),
        place("positions", positions),
        place("sequence_ids", sequence_ids),
        {name: found for name, x in groups.items() if (found := place(name, x)) is not None},
    )


def read(batch: Batch, settings: Settings) -> Tokens:
    """Flattens a batch and finds out which tokens are compared and where they stand."""
    shape, mask = batch.mask.shape, batch.mask.flatten()
    index = torch.arange(mask.numel(), device=mask.device)
    row = index.view(shape)[:, :1].expand(shape) if mask.ndim != batch.mask.ndim else None
    keep = None
    if reads_freely(mask):  # then what is masked out is dropped first; a GPU carries it along
        keep = mask.nonzero()[:, 0]
        keep = keep if keep.numel() else index[:1]
        index = index[: keep.numel()]

    def flat(x: Tensor) -> Tensor:
        return x.reshape(-1) if keep is None else x.reshape(-1).index_select(0, keep)

    def flat_if(x: Tensor | None) -> Tensor | None:
        return None if x is None else flat(x)

    given_trainer, given_rollout, mask = flat(batch.trainer), flat(batch.rollout), flat(mask)
    active = mask != 0
    odd = active & (mask != 1)  # a mask that is none: not a weight, a fault
    compared, invalid = judge_values(given_trainer, given_rollout, active & ~odd, settings.sentinels)
    invalid["mask"] = count(odd)
    # Select, never multiply: what stands at other positions may be NaN.
    trainer, rollout = (x.double().where(compared, -1.0) for x in (given_trainer, given_rollout))

    sequence_id, row = flat_if(batch.sequence_ids), flat_if(row)
    previous = segment = first = derived = None
    names = [name for name in (sequence_id, row) if name is not None]
    rank = active.cumsum(0).sub_(1)
    if names:
        before = index.where(active, -1).cummax(0).values.roll(1)
        before[0] = -1
        starts = before < 0
        for name in names:
            starts |= name != name.index_select(0, before.clamp(min=0))
        first = starts & active
        segment = first.cumsum(0).sub_(1).clamp_(min=0)
        previous = before.where(active & ~starts, -1)
        derived = rank - (rank * first).cummax(0).values
    return Tokens(
        given_trainer=given_trainer,
        given_rollout=given_rollout,
        trainer=trainer,
        rollout=rollout,
        d=trainer - rollout,
        active=active,
        compared=compared,
        invalid=invalid,
        rank=rank,
        previous=previous,
        segment=segment,
        first=first,
        position=derived if batch.positions is None else flat(batch.positions),
        token_id=flat_if(batch.token_ids),
        sequence_id=sequence_id,
        groups={name: flat(labels) for name, labels in batch.groups.items()},
    )


def bound(segment: Tensor) -> int:
    """More than any segment's index; the number of tokens where that cannot be read freely."""
    return int(segment[-1]) + 1 if reads_freely(segment) else segment.numel()

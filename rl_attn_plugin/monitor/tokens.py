"""From what a trainer holds, padded or packed, to one flat list of tokens with their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rl_attn_plugin.monitor.settings import Settings
from rl_attn_plugin.monitor.validity import judge_values, missing_like

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
        """Parts of whole rows; one part where rows are not sequences or memory is not a cache's."""
        if self.mask.ndim == 1 or self.mask.device.type != "cpu" or self.mask.numel() <= _CHUNK:
            yield self
            return
        rows = max(1, _CHUNK // max(1, self.mask.shape[1]))
        for start in range(0, self.mask.shape[0], rows):
            part = slice(start, start + rows)
            yield Batch(
                self.trainer[part],
                self.rollout[part],
                self.mask[part],
                *(None if x is None else x[part] for x in (self.token_ids, self.positions, self.sequence_ids)),
                {name: labels[part] for name, labels in self.groups.items()},
            )


class Tokens(NamedTuple):
    """The tokens of one update, flat. Everything ``[T]``.

    Attributes:
        trainer: fp64 log-probs; finite stand-ins where not compared.
        rollout: likewise.
        d: fp64, their difference; 0 where not compared.
        active: bool, the mask.
        compared: bool, active and valid on both sides.
        invalid: int64 scalars by kind.
        previous: int64, index of the active token before this one in its sequence; -1 where there is none or
            the sequences are not known.
        segment: int64, sequence of each active token, from 0; None where the sequences are not known.
        first: bool, the first active token of its sequence; None likewise.
        segments: upper bound of the number of sequences.
        position: int64, None where not known.
        token_id: int64, None where not given.
        sequence_id: int64, None where not given.
        groups: int64 by name.
    """

    trainer: Tensor
    rollout: Tensor
    d: Tensor
    active: Tensor
    compared: Tensor
    invalid: dict[str, Tensor]
    previous: Tensor
    segment: Tensor | None
    first: Tensor | None
    segments: int
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
                raise ValueError(f"{name} must have the shape of the mask, {list(shape)}, got {list(x.shape)}")
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
    trainer, rollout = batch.trainer.double().flatten(), batch.rollout.double().flatten()
    mask = batch.mask.flatten()
    active = mask != 0
    odd = active & (mask != 1)  # a mask that is none: not a weight, a fault
    compared, invalid = judge_values(trainer, rollout, active & ~odd, settings.sentinels)
    invalid["mask"] = odd.sum()
    # Select, never multiply: what stands at other positions may be NaN.
    trainer, rollout = trainer.where(compared, -1.0), rollout.where(compared, -1.0)

    index = torch.arange(active.numel(), device=active.device)
    sequence_id = None if batch.sequence_ids is None else batch.sequence_ids.flatten()
    previous = segment = first = derived = None
    if active.numel() and (mask_rows := batch.mask.ndim == 2) | (sequence_id is not None):
        before = torch.where(active, index, -1).cummax(0).values.roll(1)
        before[0] = -1
        anchor = before.clamp(min=0)
        starts = active & (before < 0)
        if sequence_id is not None:
            starts |= active & (sequence_id != sequence_id[anchor])
        if mask_rows:
            row = index // batch.mask.shape[1]
            starts |= active & (row != row[anchor])
        first = starts
        segment = starts.cumsum(0).sub_(1).clamp_(min=0)
        previous = torch.where(active & ~starts, before, -1)
        rank = active.cumsum(0) - 1
        derived = rank - torch.where(starts, rank, 0).cummax(0).values
    rows = batch.mask.shape[0] if batch.mask.ndim == 2 and sequence_id is None else active.numel()
    return Tokens(
        trainer=trainer,
        rollout=rollout,
        d=trainer - rollout,
        active=active,
        compared=compared,
        invalid=invalid,
        previous=torch.full_like(index, -1) if previous is None else previous,
        segment=segment,
        first=first,
        segments=rows,
        position=derived if batch.positions is None else batch.positions.flatten(),
        token_id=None if batch.token_ids is None else batch.token_ids.flatten(),
        sequence_id=sequence_id,
        groups={name: labels.flatten() for name, labels in batch.groups.items()},
    )

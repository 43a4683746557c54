"""A small world with a policy: logits, sampling, rounding noise, and the faults that are to be told from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

VOCABULARY = 120


@dataclass
class World:
    """What a trainer would hand over, ``[B, S]``."""

    trainer: Tensor
    rollout: Tensor
    mask: Tensor
    more: dict = field(default_factory=dict)


def world(
    seed: int,
    *,
    rows: int = 48,
    width: int = 128,
    noise: float = 0.03,
    trainer_temperature: float = 1.0,
    rollout_temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = VOCABULARY,
    entropy: float = 1.0,
) -> World:
    """Tokens sampled by a rollout whose logits differ from the trainer's by noise, right-padded ragged rows.

    Args:
        seed: everything random comes from it.
        rows: sequences.
        width: positions.
        noise: standard deviation of a logit's difference; 0.03 gives a mean abs(dlogp) of about 0.01 to 0.02.
        trainer_temperature: of the trainer's log-probs.
        rollout_temperature: of sampling and of the rollout's log-probs.
        top_p: nucleus, within which the rollout's log-probs are renormalised.
        top_k: likewise.
        entropy: below 1 the policy is more certain.
    """
    g = torch.Generator().manual_seed(seed)
    # from nearly certain to nearly flat, as in text
    scale = torch.exp(torch.randn(rows, width, 1, generator=g) * 0.8 + 1.0) / entropy
    logits = torch.randn(rows, width, VOCABULARY, generator=g) * scale
    trainer_logits = logits + noise * torch.randn(logits.shape, generator=g)
    full = torch.log_softmax(logits / rollout_temperature, -1)
    ordered, order = full.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = (before < top_p) & (torch.arange(VOCABULARY) < top_k)
    allowed = torch.zeros_like(full, dtype=torch.bool).scatter_(-1, order, kept)
    truncated = torch.log_softmax(full.masked_fill(~allowed, float("-inf")), -1)
    tokens = torch.multinomial(truncated.exp().view(-1, VOCABULARY), 1, generator=g).view(rows, width, 1)
    trainer = torch.log_softmax(trainer_logits / trainer_temperature, -1).gather(-1, tokens)[..., 0]
    rollout = truncated.gather(-1, tokens)[..., 0]
    lengths = torch.randint(width // 4, width + 1, (rows, 1), generator=g)
    return World(trainer.clamp(max=0), rollout.clamp(max=0), torch.arange(width) < lengths)


def shifted(seed: int, by: int) -> World:
    """Off by one; what comes from outside the row's tokens is left out of the mask."""
    w = world(seed)
    moved = w.rollout.roll(by, dims=1)
    mask = w.mask & w.mask.roll(by, dims=1)
    mask[:, 0 if by > 0 else -1] = False
    return World(w.trainer, moved, mask)


def late(seed: int) -> World:
    """The trainer's log-probs stand one position after the rollout's."""
    return shifted(seed, -1)


def early(seed: int) -> World:
    """One position before."""
    return shifted(seed, 1)


def copied_sequences(seed: int) -> World:
    """A fifth of the sequences came without log-probs and got the trainer's."""
    w = world(seed)
    rows = torch.arange(len(w.mask)) % 5 == 0
    return World(w.trainer, w.rollout.where(~rows[:, None], w.trainer), w.mask)


def copied_ends(seed: int) -> World:
    """The last 40 % of every sequence were missing and got the trainer's."""
    w = world(seed)
    lengths = w.mask.sum(1, keepdim=True)
    end = torch.arange(w.mask.shape[1]) >= 0.6 * lengths
    return World(w.trainer, w.rollout.where(~end, w.trainer), w.mask)


def all_copied(seed: int) -> World:
    w = world(seed)
    return World(w.trainer, w.trainer.clone(), w.mask)


def stored(seed: int, dtype: torch.dtype) -> World:
    w = world(seed)
    return World(w.trainer, w.rollout.to(dtype).float(), w.mask)


def stale(seed: int) -> World:
    """Noise grows with the lag of the policy that a sequence was sampled from."""
    parts = [world(seed * 10 + lag, noise=0.03 * (1 + lag), rows=24) for lag in range(4)]
    lag = torch.arange(4).repeat_interleave(24)
    return World(
        torch.cat([p.trainer for p in parts]),
        torch.cat([p.rollout for p in parts]),
        torch.cat([p.mask for p in parts]),
        {"groups": {"lag": lag}},
    )


def fresh(seed: int) -> World:
    """Lags, but weights that are the same."""
    w = world(seed, rows=96)
    return World(w.trainer, w.rollout, w.mask, {"groups": {"lag": torch.arange(4).repeat_interleave(24)}})


def other_padding(seed: int, fill: float) -> World:
    """The rollout is padded on the left, the trainer on the right."""
    w = world(seed)
    rollout = torch.full_like(w.rollout, fill)
    for row, mask in enumerate(w.mask):
        n = int(mask.sum())
        rollout[row, -n:] = w.rollout[row, :n]
    return World(w.trainer, rollout, w.mask)


def neighbour(seed: int, end: str) -> World:
    """At one end of each sequence the trainer sees the sequence beside it."""
    w, g = world(seed, rows=200, width=48), torch.Generator().manual_seed(seed)
    column = torch.zeros(200, dtype=torch.int64) if end == "first" else w.mask.sum(1) - 1
    strange = torch.rand(200, generator=g).clamp(min=1e-3).log() * 2 - 0.01
    trainer = w.trainer.clone()
    trainer[torch.arange(200), column] = strange
    return World(trainer, w.rollout, w.mask)


def filled(seed: int) -> World:
    """A tenth of the rollout's log-probs were missing and became 0."""
    w, g = world(seed), torch.Generator().manual_seed(seed)
    gone = torch.rand(w.mask.shape, generator=g) < 0.1
    return World(w.trainer, w.rollout.masked_fill(gone, 0.0), w.mask)

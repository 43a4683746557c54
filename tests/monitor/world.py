"""Sequences of known log-probs, the layouts they come in, and what every metric must be: numpy and plain loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
GARBAGE = (math.nan, math.inf, -math.inf, 7.0, -9999.0, 0.0)


@dataclass
class Sequence:
    """One completion; ``gap`` masked-out tokens stand before each of its tokens (tool results, for example)."""

    name: int
    trainer: Floats
    rollout: Floats
    tokens: NDArray[np.int64]
    turn: NDArray[np.int64]
    env: int = 0
    gap: list[int] = field(default_factory=list)


def sequences(
    seed: int, count: int, longest: int = 40, noise: float = 0.05, coarse: bool = False
) -> list[Sequence]:
    """Random ragged sequences in float32; ``coarse`` values tie often."""
    rng = np.random.default_rng(seed)
    found = []
    for name in range(count):
        length = int(rng.integers(1, longest + 1))
        rollout = -rng.exponential(1.0, length)
        trainer = np.minimum(rollout + noise * rng.standard_normal(length), -1e-5)  # 0 would be a fill
        if coarse:
            rollout, trainer = np.round(rollout, 1) - 0.1, np.round(trainer, 1) - 0.1
        turn = np.sort(rng.integers(0, 4, length))
        found.append(
            Sequence(
                name=1000 + name,
                trainer=trainer.astype(np.float32).astype(np.float64),
                rollout=rollout.astype(np.float32).astype(np.float64),
                tokens=rng.integers(0, 50, length),
                turn=turn,
                env=int(rng.integers(0, 2)),
                gap=[int(g) for g in rng.integers(0, 3, length)],
            )
        )
    return found


def padded(
    batch: list[Sequence], *, left: bool = False, extra: int = 0, gaps: bool = False, seed: int = 0
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], dict]:
    """``[B, S]`` arguments of `update`; what is masked out holds garbage."""
    rng = np.random.default_rng(seed)
    rows = [_row(s, gaps) for s in batch]
    width = max(len(row) for row in rows) + extra
    shape = (len(batch), width)
    trainer, rollout = (torch.tensor(rng.choice(GARBAGE, shape), dtype=torch.float32) for _ in range(2))
    mask = torch.zeros(shape, dtype=torch.bool)
    tokens, turn = (torch.tensor(rng.integers(-100, 100, shape)) for _ in range(2))
    for b, (s, row) in enumerate(zip(batch, rows, strict=True)):
        start = width - len(row) if left else 0
        for column, i in enumerate(row, start):
            if i < 0:
                continue
            trainer[b, column], rollout[b, column], mask[b, column] = s.trainer[i], s.rollout[i], True
            tokens[b, column], turn[b, column] = int(s.tokens[i]), int(s.turn[i])
    names = torch.tensor([s.name for s in batch])
    env = torch.tensor([s.env for s in batch])
    return (trainer, rollout, mask), {
        "token_ids": tokens,
        "sequence_ids": names,
        "groups": {"turn": turn, "env": env},
    }


def packed(batch: list[Sequence], *, gaps: bool = False, tail: int = 0, seed: int = 0) -> tuple[tuple, dict]:
    """``[T]`` arguments of `update`, from the padded ones."""
    args, more = padded(batch, gaps=gaps, seed=seed)
    width = args[2].shape[1]
    keep = torch.cat(
        [torch.arange(len(_row(s, gaps))) + b * width for b, s in enumerate(batch)]
        + [torch.zeros(tail, dtype=torch.int64)]
    )
    flat = [x.flatten()[keep] for x in args]
    if tail:
        flat[2][-tail:] = False

    def spread(x: torch.Tensor) -> torch.Tensor:
        x = x if x.ndim == 2 else x[:, None].expand(args[2].shape)
        return x.flatten()[keep]

    names = spread(more["sequence_ids"])
    names = torch.where(flat[2], names, torch.full_like(names, -7))  # masked-out names mean nothing
    return (flat[0], flat[1], flat[2]), {
        "token_ids": spread(more["token_ids"]),
        "sequence_ids": names,
        "groups": {name: spread(x) for name, x in more["groups"].items()},
    }


def _row(s: Sequence, gaps: bool) -> list[int]:
    row: list[int] = []
    for i in range(len(s.trainer)):
        row += [-1] * (s.gap[i] if gaps else 0)
        row.append(i)
    return row


def expected(
    batch: list[Sequence], over: float = 0.2, clip: tuple[float, float] = (0.5, 2.0)
) -> dict[str, float]:
    """Every metric of valid tokens, from its formula."""
    t, r = (np.concatenate([getattr(s, side) for s in batch]) for side in ("trainer", "rollout"))
    d = t - r
    size, w, p, q = np.abs(d), np.exp(d), np.exp(t), np.exp(r)
    found = {
        "tokens/active": len(d),
        "tokens/compared": len(d),
        "tokens/bit_equal": int((t == r).sum()),
        "tokens/over_threshold": int((size > over).sum()),
        "tokens/prob_over_half": int((np.abs(p - q) > 0.5).sum()),
        "coverage": 1.0,
        "dlogp/mean": math.fsum(d) / len(d),
        "dlogp/abs_mean": size.mean(),
        "dlogp/rms": math.sqrt((d * d).mean()),
        "dlogp/abs_max": size.max(),
        "dlogp/min": d.min(),
        "dlogp/max": d.max(),
        "kl/k1": -math.fsum(d) / len(d),
        "kl/k2": (d * d).mean() / 2,
        "kl/k3": (np.expm1(d) - d).mean(),
        "ratio/min": w.min(),
        "ratio/mean": w.mean(),
        "ratio/max": w.max(),
        "chi2": (np.expm1(d) ** 2).mean(),
        "ess": w.sum() ** 2 / (len(w) * (w * w).sum()),
        "clip/above": (w > clip[1]).mean(),
        "clip/below": (w < clip[0]).mean(),
        "clip/truncated_mean": np.minimum(w, clip[1]).mean(),
        "clip/masked_mean": np.where((w >= clip[0]) & (w <= clip[1]), w, 0).mean(),
        "prob/abs_mean": np.abs(p - q).mean(),
        "prob/abs_max": np.abs(p - q).max(),
        "ppl/trainer": math.exp(-t.mean()),
        "ppl/rollout": math.exp(-r.mean()),
        "ppl/ratio": math.exp(-math.fsum(d) / len(d)),
    }
    if p.std() > 1e-6 and q.std() > 1e-6:
        found["prob/pearson"] = np.corrcoef(p, q)[0, 1]
    turns = [(s.trainer[s.turn == k], s.rollout[s.turn == k]) for s in batch for k in np.unique(s.turn)]
    for name, parts in (("sequence", [(s.trainer, s.rollout) for s in batch]), ("turn", turns)):
        ratio = np.array([math.fsum(a - b) for a, b in parts])
        mean = np.array([math.fsum(a - b) / len(a) for a, b in parts])
        whole = np.exp(ratio)
        found |= {
            f"{name}/count": len(parts),
            f"{name}/incomplete": 0,
            f"{name}/log_ratio_mean": ratio.mean(),
            f"{name}/log_ratio_abs_mean": np.abs(ratio).mean(),
            f"{name}/log_ratio_min": ratio.min(),
            f"{name}/log_ratio_max": ratio.max(),
            f"{name}/ratio_mean": whole.mean(),
            f"{name}/ess": whole.sum() ** 2 / (len(parts) * (whole**2).sum()),
            f"{name}/mean_dlogp_mean": mean.mean(),
            f"{name}/mean_dlogp_abs_mean": np.abs(mean).mean(),
            f"{name}/mean_dlogp_min": mean.min(),
            f"{name}/mean_dlogp_max": mean.max(),
            f"{name}/abs_mean": np.mean([np.abs(a - b).mean() for a, b in parts]),
            f"{name}/geometric_ratio_mean": np.exp(mean).mean(),
            f"{name}/prob_over_half": np.mean(
                [(np.abs(np.exp(a) - np.exp(b)) > 0.5).any() for a, b in parts]
            ),
            f"{name}/clip_above": (whole > clip[1]).mean(),
            f"{name}/clip_below": (whole < clip[0]).mean(),
            f"{name}/truncated_mean": np.minimum(whole, clip[1]).mean(),
            f"{name}/masked_mean": np.where((whole >= clip[0]) & (whole <= clip[1]), whole, 0).mean(),
        }
    return {key: float(value) for key, value in found.items()}

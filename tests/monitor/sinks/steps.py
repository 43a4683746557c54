"""Steps to write: judged by a real watch, from real updates."""

from __future__ import annotations

import torch

from rl_attn_plugin.monitor import DriftMonitor, Judgement, Watch


class Letters:
    """A tokenizer of 26 tokens and two that break tables."""

    def decode(self, ids: list[int]) -> str:
        return "".join("abcdefghijklmnopqrstuvwxyz|`"[i] for i in ids)


def judged(
    step: int, size: float = 0.01, tokens: int = 2000, invalid: int = 0, watch: Watch | None = None
) -> tuple[Judgement, DriftMonitor]:
    """A step of tokens off by up to ``size`` nats, some bit-equal, of which the first ``invalid`` are NaN.

    Args:
        step: its number.
        size: largest abs(dlogp), nats.
        tokens: how many.
        invalid: trainer log-probs that are NaN.
        watch: that judges; a new one if None.
    """
    g = torch.Generator().manual_seed(step)
    rollout = -torch.rand(tokens, generator=g, dtype=torch.float64) * 2 - 0.5
    off = (torch.rand(tokens, generator=g, dtype=torch.float64) * 2 - 1) * size
    off[::7] = 0
    trainer = (rollout + off).clamp(max=-0.01)  # a positive one is no log-prob
    trainer[:invalid] = torch.nan
    monitor = DriftMonitor()
    ids = torch.arange(tokens) % 28
    monitor.update(
        trainer,
        rollout,
        torch.ones(tokens),
        step=step,
        token_ids=ids,
        sequence_ids=torch.arange(tokens) // 40,
    )
    return (watch or Watch()).judge(step, monitor, tokenizer=Letters()), monitor

"""Sampling is the distribution it says, and its randomness belongs to the sample alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from rl_attn_plugin.launch.config import Sampling
from rl_attn_plugin.launch.rollout import draw, prefill, token_logps


def _nucleus(logits: torch.Tensor, temperature: float, top_p: float) -> np.ndarray:
    """The truncated distribution, written plainly in numpy."""
    scaled = logits.numpy().astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    kept = np.zeros(len(p))
    total = 0.0
    for index in sorted(range(len(p)), key=lambda i: -p[i]):
        kept[index] = p[index]
        total += p[index]
        if total >= top_p:
            break
    return np.asarray(kept / kept.sum())


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9), (1.5, 0.5), (1.0, 1e-6)])
def test_draws_follow_the_truncated_distribution(temperature: float, top_p: float) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.1, 0.9, -4.0])
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=3)
    count = 6000
    drawn = np.bincount([draw(logits, sampling, sample, 0) for sample in range(count)], minlength=6)
    expected = _nucleus(logits, temperature, top_p)
    assert (drawn[expected == 0] == 0).all()
    sigma = np.sqrt(count * expected * (1 - expected))
    assert (np.abs(drawn - count * expected) <= 4.5 * sigma + 1e-9).all(), (drawn, count * expected)


def test_steps_samples_and_seeds_are_independent_streams_and_repeatable() -> None:
    logits = torch.zeros(1000)
    base = [
        draw(logits, Sampling(seed=1, top_p=1.0), sample, step) for sample in range(10) for step in range(20)
    ]
    again = [
        draw(logits, Sampling(seed=1, top_p=1.0), sample, step) for sample in range(10) for step in range(20)
    ]
    other = [
        draw(logits, Sampling(seed=2, top_p=1.0), sample, step) for sample in range(10) for step in range(20)
    ]
    assert base == again
    assert sum(a == b for a, b in zip(base, other, strict=True)) < 10
    assert len(set(base)) > 150  # 200 draws from 1000: about 181 are distinct


def test_token_logps_are_at_the_temperature_without_truncation() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0)) * 4
    tokens = torch.tensor([0, 49, 3, 7, 7])
    expected = torch.log_softmax(logits.double() / 0.6, -1)[torch.arange(5), tokens]
    assert torch.allclose(token_logps(logits, tokens, 0.6).double(), expected, atol=1e-5, rtol=0)
    assert token_logps(logits.bfloat16(), tokens, 0.6).dtype == torch.float32


class _Echo:
    """A session whose logits name the row and the index of the token they belong to."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.widths: list[dict[int, int]] = []

    def close_rows(self, rows: Sequence[int]) -> None:
        raise AssertionError("a prefill closes nothing")

    def feed(self, tokens: Mapping[int, Sequence[int]], keep: Mapping[int, int]) -> dict[int, torch.Tensor]:
        self.widths.append({row: len(new) for row, new in tokens.items()})
        out = {}
        for row, new in tokens.items():
            start = self.lengths.get(row, 0)
            self.lengths[row] = start + len(new)
            if keep.get(row):
                index = torch.arange(start, start + len(new))[-keep[row] :]
                out[row] = torch.stack([torch.full_like(index, row), index], 1).float()
        return out


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 100])
def test_prefill_keeps_exactly_the_last_logits_whatever_the_chunks(chunk_size: int) -> None:
    rows = {0: list(range(7)), 1: [9], 2: list(range(5))}
    keep = {0: 4, 1: 1, 2: 5}
    session = _Echo()
    logits = prefill(session, rows, keep, chunk_size)
    for row, tokens in rows.items():
        expected = [[row, index] for index in range(len(tokens) - keep[row], len(tokens))]
        assert logits[row].tolist() == expected
    assert all(width <= chunk_size for widths in session.widths for width in widths.values())
    assert session.lengths == {0: 7, 1: 1, 2: 5}

"""The paged cache: any chunking, any page order, poisoned pages, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_attn_plugin.integrations.transformers import (
    NativeSession,
    PagedCache,
    PagedSession,
    register,
    score_packed,
)
from rl_attn_plugin.integrations.transformers.paged import paged_forward
from tests.integrations.transformers.models import CONFIGS, make, native

register()


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def poison(cache: PagedCache) -> None:
    """What an unused page may hold: anything."""
    for pair in cache._caches:
        assert pair is not None
        for tensor in pair:
            tensor.fill_(torch.nan)


@pytest.mark.parametrize("name", CONFIGS)
def test_mixed_steps_equal_full_forwards(name: str) -> None:
    """Chunks and single tokens of sequences that come and go, over scattered pages full of NaN."""
    model = make(name, "rl_attn")
    sequences = {"a": ids(30, 1), "b": ids(11, 2), "c": ids(19, 3)}
    cache = PagedCache(3, 40, 4, page_order=torch.randperm(40).tolist())
    cache.add("warm")
    paged_forward(model, cache, {"warm": ids(3, 9)}, {})
    cache.free("warm")
    poison(cache)
    for key in ("a", "b"):
        cache.add(key)
    seen: dict[str, list[Tensor]] = {key: [] for key in sequences}
    fed = dict.fromkeys(sequences, 0)

    def step(**counts: int) -> None:
        new = {key: sequences[key][fed[key] : fed[key] + n] for key, n in counts.items()}
        for key, part in paged_forward(model, cache, new, counts).items():
            seen[key].append(part)
            fed[key] += counts[key]

    step(a=7, b=11)
    cache.free("b")
    cache.add("c")
    step(a=1, c=9)
    step(c=1, a=1)
    step(c=9, a=21)
    assert cache.length("a") == 30 and cache.length("c") == 19
    for key, sequence in sequences.items():
        with torch.no_grad():
            want = model(input_ids=torch.tensor([sequence])).logits[0]
        torch.testing.assert_close(torch.cat(seen[key]), want, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_sessions_agree_with_packed_scoring(name: str) -> None:
    """Rows of different lengths, chunks, decode, a row closed early: both arms against full prefill."""
    model = make(name, "sdpa" if native(name) == "sdpa" else "eager")
    rows = [ids(25, 4), ids(13, 5)]
    for attention, session in (
        ("rl_attn", PagedSession(model, 2, num_pages=20, page_size=4)),
        (native(name), NativeSession(model, 2, attn_implementation=native(name))),
    ):
        want = score_packed(model, rows, attn_implementation=attention, temperature=0.7)
        got: list[list[Tensor]] = [[], []]
        fed = [0, 0]

        def feed(*counts: int, session: PagedSession | NativeSession = session, fed: list[int] = fed,
                 got: list[list[Tensor]] = got) -> None:  # fmt: skip
            new = {r: rows[r][fed[r] : fed[r] + n] for r, n in enumerate(counts) if n}
            for r, part in session.feed(new, {r: len(t) for r, t in new.items()}).items():
                got[r].append(part)
                fed[r] += len(new[r])

        feed(9, 12)
        feed(1, 1)
        session.close_rows([1])
        feed(15, 0)
        for r, row in enumerate(rows):
            scores = torch.log_softmax(torch.cat(got[r])[:-1] / 0.7, -1)
            mine = scores.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
            torch.testing.assert_close(mine, want[r], atol=5e-4, rtol=5e-4)


def test_scoring_does_not_shift_and_packs_in_order() -> None:
    model = make("llama", "rl_attn")
    rows = [ids(9, 1), ids(2, 2), ids(30, 3), ids(5, 4)]
    starts = [1, 1, 17, 5]
    whole = score_packed(model, rows, starts=starts)
    assert [len(x) for x in whole] == [8, 1, 13, 0]
    small = score_packed(model, rows, starts=starts, max_tokens_per_pack=10)
    for a, b, row, start in zip(whole, small, rows, starts, strict=True):
        with torch.no_grad():
            scores = torch.log_softmax(model(input_ids=torch.tensor([row])).logits[0], -1)
        want = torch.stack([scores[t - 1, row[t]] for t in range(start, len(row))]) if start < len(row) else a
        torch.testing.assert_close(a, want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(b, want, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"starts\[0\] must be 1 to the sequence's length 9, got 0"):
        score_packed(model, rows[:1], starts=[0])
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        score_packed(model, rows[:1], temperature=0)


def test_running_out_of_pages_changes_nothing() -> None:
    model = make("llama", "rl_attn")
    cache = PagedCache(3, 3, 4)
    cache.add("a")
    cache.add("b")
    paged_forward(model, cache, {"a": ids(5, 1)}, {})
    with pytest.raises(RuntimeError, match="needs 2 more pages of 4 tokens and has 1 of 3 free"):
        paged_forward(model, cache, {"a": ids(1, 2), "b": ids(8, 2)}, {})
    assert cache.length("a") == 5 and cache.length("b") == 0 and cache.num_free_pages == 1
    cache.free("a")
    assert cache.num_free_pages == 3
    paged_forward(model, cache, {"b": ids(12, 2)}, {})


def test_refusals() -> None:
    model = make("llama", "rl_attn")
    cache = PagedCache(3, 3, 4)
    cache.add("a")
    with pytest.raises(ValueError, match="'a' must be new to the cache"):
        cache.add("a")
    with pytest.raises(KeyError, match=r"'b' is not in the cache, which holds \['a'\]"):
        cache.free("b")
    with pytest.raises(ValueError, match="must bring at least one token, got 0"):
        paged_forward(model, cache, {"a": []}, {})
    with pytest.raises(ValueError, match="keep of sequence 'a' must be 0 to its new tokens 1, got 2"):
        paged_forward(model, cache, {"a": [1]}, {"a": 2})
    with pytest.raises(ValueError, match="num_pages=0"):
        PagedCache(3, 0, 4)
    with pytest.raises(ValueError, match=r"page_order must name each of 3 pages once, got \[0, 1, 1\]"):
        PagedCache(3, 3, 4, page_order=[0, 1, 1])
    with pytest.raises(RuntimeError, match="must be driven by paged_forward"):
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)

"""The same tokens give the same numbers, however they are batched, padded, packed, ordered or spread over ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_attn_plugin.monitor import DriftMonitor, evidence, validity
from rl_attn_plugin.monitor import tokens as tokens_module
from tests.monitor.world import Sequence, packed, padded, sequences

GROUPS = {"turn": 4, "env": ("math", "code")}


def fed(batches: list[list[Sequence]], layouts: list[int], **choices) -> DriftMonitor:
    monitor = DriftMonitor(groups=GROUPS, **choices)
    for i, (batch, layout) in enumerate(zip(batches, layouts, strict=True)):
        if layout % 2:
            args, more = packed(batch, gaps=layout > 3, tail=layout, seed=i)
        else:
            args, more = padded(batch, left=layout > 3, extra=layout, gaps=layout in (2, 6), seed=i)
        monitor.update(*args, step=0, **more)
    return monitor


def split(batch: list[Sequence], seed: int, parts: int) -> list[list[Sequence]]:
    """Shuffled and cut into non-empty parts."""
    rng = random.Random(seed)
    batch = rng.sample(batch, len(batch))
    cuts = sorted(rng.sample(range(1, len(batch)), min(parts, len(batch)) - 1)) if len(batch) > 1 else []
    return [batch[a:b] for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True)]


def assert_same(a: DriftMonitor, b: DriftMonitor) -> None:
    """Counts equal, floats to 1e-12, and tables, histogram, evidence and worst tokens too."""
    x, y = a.compute(), b.compute()
    assert {k for k in x if not k.startswith("updates/")} == {k for k in y if not k.startswith("updates/")}
    for key, value in x.items():
        exact = key.startswith(("tokens/", "invalid/", "coverage", "clip/above", "clip/below"))
        if exact or key in (
            "dlogp/abs_max",
            "dlogp/min",
            "dlogp/max",
            "prob/abs_max",
            "ratio/min",
            "ratio/max",
        ):
            assert value == y[key], key
        if not key.startswith("updates/"):
            assert y[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key
    assert a.histogram() == b.histogram()
    assert torch.equal(
        a.state().evidence[:-4], b.state().evidence[:-4]
    )  # the last four are about padding itself
    for name in ("position", "probability", *GROUPS):
        for p, q in zip(a.table(name), b.table(name), strict=True):
            assert (p.label, p.count, p.abs_max, p.abs_p95) == (q.label, q.count, q.abs_max, q.abs_p95)
            assert q.mean == pytest.approx(p.mean, rel=1e-12, abs=1e-12)
            assert q.abs_mean == pytest.approx(p.abs_mean, rel=1e-12)
    assert a.worst() == b.worst()
    assert [repr(t) for t in a.invalid()] == [repr(t) for t in b.invalid()]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 14),
    parts=st.integers(1, 6),
    layouts=st.lists(st.integers(0, 7), min_size=6, max_size=6),
    coarse=st.booleans(),
)
def test_batching_padding_packing_and_order_do_not_matter(
    seed: int, count: int, parts: int, layouts: list[int], coarse: bool
) -> None:
    batch = sequences(seed, count, coarse=coarse)
    cut = split(batch, seed, parts)
    whole, pieces = fed([batch], [0], worst=5), fed(cut, layouts[: len(cut)], worst=5)
    assert_same(whole, pieces)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(3, 12), coarse=st.booleans())
def test_merging_is_commutative_and_associative(seed: int, count: int, coarse: bool) -> None:
    cut = split(sequences(seed, count, coarse=coarse), seed, 3)
    a, b, c = (fed([part], [i], worst=5) for i, part in enumerate(cut))
    assert_same(a.merge(b), b.merge(a))
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)))
    assert_same(a.merge(b).merge(c), fed(cut, [0, 1, 2], worst=5))
    assert_same(a, a.merge(DriftMonitor(groups=GROUPS, worst=5)))
    assert a.compute()["updates/count"] == 1, "merging changes neither"


def test_a_merged_monitor_is_its_own() -> None:
    batch = sequences(2, 6)
    source, other = fed([batch], [0]), DriftMonitor(groups=GROUPS)
    merged = source.merge(other)
    before = merged.compute()
    for _ in range(2):
        args, more = padded(batch)
        source.update(args[0], args[1][:, 1:], args[2], step=1)
        source.update(*args, step=1, **more)
    assert merged.compute() == before and other.compute()["updates/count"] == 0


def test_a_refused_description_changes_nothing() -> None:
    monitor = fed([sequences(2, 6)], [0])
    before = monitor.compute()
    with pytest.raises(ValueError, match="token_ids must have the shape"):
        monitor.update(-torch.ones(2), -torch.ones(2), torch.ones(2), step=0, token_ids=torch.ones(3))
    assert monitor.compute() == before


def test_chunks_of_a_large_update_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = sequences(5, 30)
    whole = fed([batch], [4])
    monkeypatch.setattr(tokens_module, "_CHUNK", 64)
    pieces = fed([batch], [4])
    assert_same(whole, pieces)
    assert whole.compute()["updates/count"] == pieces.compute()["updates/count"] == 1
    assert torch.equal(whole.state().evidence, pieces.state().evidence)


def test_what_is_kept_whole_on_a_gpu_is_what_a_cpu_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU carries masked-out tokens along; that way of reading, on a CPU."""
    batch = sequences(6, 20)
    dropped = fed([batch], [2]), fed([batch], [5])
    for module in (tokens_module, validity, evidence):
        monkeypatch.setattr(module, "reads_freely", lambda x: False)
    for layout, want in zip((2, 5), dropped, strict=True):
        assert_same(want, fed([batch], [layout]))


def test_signed_means_survive_cancellation() -> None:
    """Terms of both signs that cancel to 1e-9 of their size: plain fp64 sums differ by order here."""
    torch.manual_seed(0)
    half = torch.rand(40_000, dtype=torch.float64) * 4 + 1
    d = torch.cat([half, -half, torch.full((1,), 1e-4, dtype=torch.float64)])
    rollout = -torch.full_like(d, 6.0)
    means = []
    for seed in range(4):
        order = torch.randperm(len(d), generator=torch.Generator().manual_seed(seed))
        monitor = DriftMonitor()
        for part in order.chunk(7):
            monitor.update(rollout[part] + d[part], rollout[part], torch.ones(len(part)), step=0)
        means.append(monitor.compute()["dlogp/mean"])
    exact = sum(((rollout + d) - rollout).tolist()) / len(d)
    assert max(means) - min(means) <= 1e-12 * abs(exact)


def test_state_dict_survives_a_file(tmp_path: Path) -> None:
    monitor = fed([sequences(1, 8)], [0], over_threshold=0.1, clip=(0.8, 1.2), sentinels=(-100.0,))
    torch.save(monitor.state_dict(), tmp_path / "monitor.pt")
    loaded = DriftMonitor.from_state_dict(torch.load(tmp_path / "monitor.pt", weights_only=True))
    assert loaded.settings == monitor.settings and loaded.compute() == monitor.compute()
    assert_same(loaded, monitor)
    assert_same(loaded.merge(monitor), monitor.merge(monitor))
    with pytest.raises(ValueError, match="must have format"):
        DriftMonitor.from_state_dict({"format": "other"})


def test_different_settings_do_not_merge() -> None:
    with pytest.raises(ValueError, match="must have equal settings"):
        DriftMonitor().merge(DriftMonitor(clip=(0.1, 3)))


def test_reset_forgets_all() -> None:
    monitor = fed([sequences(1, 3)], [0])
    monitor.reset()
    assert monitor.compute() == DriftMonitor(groups=GROUPS).compute() and monitor.worst() == []


def _rank(rank: int, world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    batch = sequences(11, 25, coarse=True)
    # rank 0 has most of the tokens; rank 2, where there is one, has none at all
    mine = [batch[:19], batch[19:], []][rank]
    monitor = DriftMonitor(groups=GROUPS, worst=7)
    if mine:
        args, more = padded(mine, left=rank == 1, gaps=rank == 0)
        monitor.update(*args, step=0, **more)
    before = monitor.compute()
    reduced = monitor.all_reduce()
    again = monitor.all_reduce()
    assert monitor.compute() == before, "reducing changes nothing here, so that it can be called again"
    torch.save([reduced.state_dict(), again.state_dict()], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_reduce_to_what_one_monitor_sees(tmp_path: Path, world: int) -> None:
    mp.spawn(_rank, (world, str(tmp_path)), nprocs=world, join=True)
    single = fed([sequences(11, 25, coarse=True)], [0], worst=7)
    for rank in range(world):
        for saved in torch.load(tmp_path / f"{rank}.pt", weights_only=True):
            assert_same(single, DriftMonitor.from_state_dict(saved))

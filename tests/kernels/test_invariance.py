"""Promise 1: the bits of a row do not depend on how it was computed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rl_attn_plugin.kernels.schedule import Tile, Tuning
from tests.kernels.worlds import World, compare_ways, differing, make_options, random_world


@pytest.mark.parametrize("seed", range(4))
def test_every_way_gives_the_same_bits_in_the_interpreter(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    world = random_world(
        rng, device, dims=[(16, 16), (24, 16), (16, 40)], dtypes=[torch.bfloat16, torch.float16, torch.float32],
        lengths=[16, 33, 40], block_k=16, split_k=32,
    )  # fmt: skip
    base = [world.packed([i])[0] for i in range(len(world.q))]
    ways = compare_ways(world, base, rng, [Tile(16, 4, 1), Tile(32, 4, 1), Tile(64, 4, 1)])
    assert not any(ways.values()), (ways, world.options)


def test_a_different_split_gives_different_bits(device: torch.device) -> None:
    """The control: the comparison above can fail."""
    generator = torch.Generator(device=device).manual_seed(1)
    q, k, v = (torch.randn(96, 2, 16, generator=generator, device=device) for _ in range(3))
    one = World([q], [k], [v], make_options(16, block_k=16, split_k=32, out_dtype=torch.float32))
    other = replace(one, options=replace(one.options, split_k=48))
    assert differing(one.packed([0]), other.packed([0])) == 1


DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
TILES = [Tile(64, 4, 3), Tile(64, 4, 1), Tile(128, 8, 3), Tile(128, 8, 2), Tile(128, 4, 2)]


SHARDS, WORLDS = 14, 84  # shards may run in parallel processes: compiling the variants is most of the time


@pytest.mark.gpu
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_way_gives_the_same_bits_on_the_gpu(shard: int, device: torch.device) -> None:
    cases, failures = 0, []
    for seed in range(shard, WORLDS, SHARDS):
        rng = random.Random(seed)
        world = random_world(
            rng, device, dims=[DIMS[seed % len(DIMS)]], lengths=[64, 333, 1024, 1500, 2048, 3100],
            dtypes=[torch.float32] if seed % 7 == 6 else [torch.bfloat16, torch.float16],
        )  # fmt: skip
        base = [world.packed([i])[0] for i in range(len(world.q))]
        tiles = [] if world.q[0].dtype == torch.float32 else TILES
        if max(world.q[0].shape[2], world.v[0].shape[2]) > 128:
            tiles = [t for t in tiles if t.stages < 3 and t.warps * 16 >= t.rows]
        ways = compare_ways(world, base, rng, tiles)
        cases += len(ways)
        if any(ways.values()):
            failures.append((seed, ways, world.q[0].dtype, world.q[0].shape, world.options))
    assert cases * SHARDS >= 500
    assert not failures, "\n".join(map(str, failures))


@pytest.mark.gpu
def test_warps_along_keys_are_caught(device: torch.device) -> None:
    """The control on a GPU: sixteen rows with four warps put warps along keys, and the test above sees it."""
    generator = torch.Generator(device=device).manual_seed(3)
    q, k, v = (torch.randn(2000, 4, 128, generator=generator, device=device).bfloat16() for _ in range(3))
    good = World([q], [k], [v], make_options(128))
    bad = replace(good, tuning=Tuning(tile=Tile(16, 4, 2)))
    assert differing(good.packed([0]), good.dense(0)) == 0
    assert differing(good.packed([0]), bad.packed([0])) == 1

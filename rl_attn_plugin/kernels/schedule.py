"""Host-side choices that must not change bits: tiles, program mapping, loop or grid over splits, plans.

Everything here is a function of shapes and host bounds, or, for a plan, of lengths read once a step.
Imports no Triton, so a plan can be made wherever torch runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rl_attn_plugin.types import Layout, PagedPlan

# Partial states a decode call may hold, in bytes; beyond it, splits become a loop.
_DECODE_WORKSPACE = 48 << 20
# A prefill that leaves most of the device idle is worth more memory, since its partials are its only parallelism.
_PREFILL_WORKSPACE = 192 << 20


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows, warps and pipeline depth of a program. Warps must lie along rows only.

    Attributes:
        rows: (query, group head) pairs of a program.
        warps: of 32 lanes; 64 rows take 4, 128 take 8.
        stages: loads in flight.
    """

    rows: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """Overrides of the choices below, for tests and benchmarks; None leaves a choice alone."""

    tile: Tile | None = None
    grid: bool | None = None
    search: bool | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """How one forward is spread over programs.

    Attributes:
        tile: of the attention kernel.
        mode: `rl_attn_plugin.kernels.tiles` DENSE, DIRECT, SEARCH or PLANNED.
        tiles: tiles of a sequence (DENSE, DIRECT); 1 otherwise.
        programs: programs a kv head and split.
        splits: grid over splits, or 0 for a loop.
    """

    tile: Tile
    mode: int
    tiles: int
    programs: int
    splits: int


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def padded(dim: int) -> int:
    """The power of two, at least 16, that a head dim is padded to."""
    return max(16, 1 << (dim - 1).bit_length())


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _stages(dim: int, v_dim: int) -> int:
    """Loads in flight that fit shared memory: 228 KB a multiprocessor on Hopper, 64 KB on AMD."""
    return 3 if padded(dim) + padded(v_dim) <= 384 and not torch.version.hip else 2


def decode_tile(dtype: torch.dtype, dim: int, v_dim: int) -> Tile:
    """The tile for few rows. fp32 has only this one: without tensor cores a row sum depends on the tile."""
    if dtype == torch.float32:
        return Tile(16, 4, 1)
    return Tile(64, 4, _stages(dim, v_dim))


def prefill_tile(dtype: torch.dtype, dim: int, v_dim: int) -> Tile:
    """The tile for many rows."""
    if dtype == torch.float32:
        return decode_tile(dtype, dim, v_dim)
    return Tile(128, 8, _stages(dim, v_dim))


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """Query rows and keys of a program's inner product, warps and pipeline depth."""

    rows: int
    keys: int
    warps: int
    stages: int


def backward_tiles(dtype: torch.dtype, dim: int, v_dim: int) -> tuple[BackwardTile, BackwardTile]:
    """Tiles of the pass for dk and dv, and of the pass for dq. They decide the bits of gradients."""
    if dtype == torch.float32:
        return BackwardTile(16, 16, 4, 1), BackwardTile(16, 16, 4, 1)
    if max(dim, v_dim) > 128:
        return BackwardTile(32, 64, 8, 1), BackwardTile(64, 32, 8, 1)
    if torch.version.hip:
        return BackwardTile(64, 128, 8, 1), BackwardTile(128, 64, 8, 1)
    return BackwardTile(64, 128, 8, 2), BackwardTile(128, 64, 8, 3)


def split_bound(layout: Layout, left: int, right: int, split: int) -> int:
    """Splits that one sequence's queries can see at most, from host bounds."""
    keys = layout.max_seqlen_k
    aligned = layout.kv_start is None
    if left >= 0 and right >= 0 and layout.max_seqlen_q + left + right < keys:
        keys, aligned = layout.max_seqlen_q + left + right, False
    return cdiv(keys, split) if aligned else cdiv(max(keys - 1, 0), split) + 1


def plan_launch(
    layout: Layout,
    *,
    batch: int,
    total: int,
    group: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
    dtype: torch.dtype,
    window: tuple[int, int],
    split: int,
    device: torch.device,
    tuning: Tuning,
) -> Launch:
    """Choose tile, mapping, and loop or grid, from shapes and host bounds alone.

    Args:
        layout: of the call.
        batch: sequences.
        total: query rows in memory, over all sequences.
        group: query heads a kv head.
        kv_heads: Hkv.
        dim: D.
        v_dim: Dv.
        dtype: of q.
        window: left and right.
        split: keys of a split.
        device: of q.
        tuning: overrides.
    """
    busy = multiprocessors(device)
    decode = layout.max_seqlen_q * group <= 64
    tile = decode_tile(dtype, dim, v_dim) if decode else prefill_tile(dtype, dim, v_dim)
    if not decode and cdiv(total * group, tile.rows) * kv_heads < 2 * busy:
        tile = decode_tile(dtype, dim, v_dim)
    if tuning.tile is not None:
        tile = tuning.tile
    mode, tiles, programs = _mapping(layout, batch, total, group, tile.rows, tuning.search)

    splits = split_bound(layout, *window, split)
    states = total * group * kv_heads * splits * (v_dim + 2) * 4
    starved = programs * kv_heads < busy
    limit = _PREFILL_WORKSPACE if starved and not decode else _DECODE_WORKSPACE
    grid = splits > 1 and (decode or starved) and states <= limit
    if tuning.grid is not None:
        grid = tuning.grid
    return Launch(tile, mode, tiles, programs, max(splits, 1) if grid else 0)


def _mapping(
    layout: Layout, batch: int, total: int, group: int, rows: int, search: bool | None
) -> tuple[int, int, int]:
    """Mode, tiles a sequence, programs a kv head."""
    if layout.cu_seqlens_q is None:
        tiles = cdiv(total // max(batch, 1) * group, rows)
        return 0, tiles, tiles * batch
    tiles = max(cdiv(layout.max_seqlen_q * group, rows), 1)
    direct = tiles * (batch + 2)
    found = total * group // rows + batch + 2
    if search is None:
        search = direct > found
    # a sequence's memory may be longer than max_seqlen_q only where seqused_q says so
    if search or layout.seqused_q is not None:
        return 2, 1, found
    return 1, tiles, direct


def row_programs(layout: Layout, batch: int, total: int, group: int) -> tuple[int, int, int]:
    """Mode, tiles and programs of a kernel with one row a program."""
    return _mapping(layout, batch, total, group, 1, None)


def search_steps(batch: int) -> int:
    """Halvings that find one of ``batch + 2`` entries."""
    return (batch + 1).bit_length()


def plan_paged(
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    split_k: int,
    kv_start: Tensor | None = None,
) -> PagedPlan:
    """Spread one step over the device by its real lengths, which this reads to the host.

    The plan holds for every mask: a layer with a window leaves the items outside it at once.

    Args:
        cu_seqlens_q: int32 ``[B + 1]``.
        seqlens_k: int32 ``[B]``.
        num_heads: Hq.
        num_kv_heads: Hkv.
        head_dim: D.
        v_head_dim: Dv.
        dtype: of q.
        split_k: of the schedule.
        kv_start: int32 ``[B]`` or None.

    Returns:
        ``work`` int32 ``[3, items, 4]``: whole tiles, (tile, split) pairs, and rows to merge, each as
        (entry or -1, tile or row, split, first slot of the sequence); and the slots that partials take.
    """
    offsets, keys = cu_seqlens_q.tolist(), seqlens_k.tolist()
    starts = [0] * len(keys) if kv_start is None else kv_start.tolist()
    group = num_heads // num_kv_heads
    rows = decode_tile(dtype, head_dim, v_head_dim).rows
    queries = [b - a for a, b in pairwise(offsets)]
    busy = multiprocessors(cu_seqlens_q.device)
    starved = sum(cdiv(n * group, rows) for n in queries) * num_kv_heads < busy

    whole: list[tuple[int, int, int, int]] = []
    parts: list[tuple[int, int, int, int]] = []
    merged: list[tuple[int, int, int, int]] = []
    slots = 0
    for b, (n, used, start) in enumerate(zip(queries, keys, starts, strict=True)):
        tiles = cdiv(n * group, rows)
        splits = max(cdiv(start + used, split_k) - start // split_k, 1)
        if splits > 1 and (tiles == 1 or starved):
            parts += [(b + 1, t, z, slots) for t in range(tiles) for z in range(splits)]
            merged += [(b + 1, r, 0, slots) for r in range(n * group)]
            slots += splits * n * num_heads
        else:
            whole += [(b + 1, t, splits, 0) for t in reversed(range(tiles))]
    whole.sort(key=lambda item: -item[2])  # longest first
    whole += [(0, 0, 0, 0), (len(keys) + 1, 0, 0, 0)]  # rows outside every sequence
    items = max(len(whole), len(parts), len(merged))
    table = torch.full((3, items, 4), -1, dtype=torch.int32)
    for section, entries in enumerate((whole, parts, merged)):
        if entries:
            table[section, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
    return PagedPlan(table.to(cu_seqlens_q.device, non_blocking=True), slots)

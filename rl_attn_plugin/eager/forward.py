"""The forward of ``impl="torch"``: blocks of keys at absolute positions, splits merged in ascending order."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_attn_plugin.eager.rope import turn
from rl_attn_plugin.eager.sequences import KeyGather, Sequence, sequences
from rl_attn_plugin.types import Layout, Options, PagedPlan, Rope

# Rows of one query tile. A position takes as many of them as its group has heads, rounded up to a power of
# two. Small, because a decode step has one position a sequence and pays for the rest.
TILE_ROWS = 8
# Sequences of at least this many tiles run alone and block by block, sharing one stride-0 key block over
# their tiles; smaller ones (decode) run as one batch over sequences and blocks. Both meet the same matrix
# shapes, so the choice does not change bits.
_TILES_ALONE = 8

# The first exp of a process initialises the vector maths library. When two threads meet there, one of them can
# compute its half with another, less exact code path (seen in 3 of 40 fresh processes, off by 1e-4; in none of
# 90 with this call first). So it is initialised here, by one thread.
for _first_use in (torch.exp, torch.log, torch.tanh):
    _first_use(torch.ones(16, device="cpu"))

State = tuple[Tensor, Tensor, Tensor]  # (m, l, acc): row maximum, row sum, unnormalised output


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    options: Options,
    *,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
    plan: PagedPlan | None,
    rope: Rope | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention by the schedule; see `rl_attn_plugin.types` for the meaning of every argument.

    ``plan`` spreads work over a GPU's programs and is of no use here.

    Returns:
        ``out`` in ``options.out_dtype``, fp32 ``lse`` (``[Hq, T]`` or ``[B, Hq, S]``), and fp32
        ``max_logits`` ``[Hq]`` (``[0]`` unless asked for).
    """
    dense = layout.cu_seqlens_q is None
    if rope is not None:
        q = turn(q, rope, rope.positions)
        k = turn(k, rope, rope.positions_k) if layout.block_table is None else k
    heads, v_dim = q.shape[-2], v.shape[-1]
    every = sequences(q, k, layout, options)
    rows = q.reshape(-1, heads, q.shape[-1])
    if layout.block_table is None:
        k, v = (x.reshape(-1, *x.shape[-2:]) for x in (k, v))
    flat_out = q.new_zeros(rows.shape[0], heads, v_dim, dtype=torch.float32)
    flat_lse = q.new_full((rows.shape[0], heads), -torch.inf, dtype=torch.float32)
    maxima = q.new_full((heads,), -torch.inf, dtype=torch.float32)

    groups = heads // k.shape[-2]
    for group in _grouped(every, groups):
        tiles = _Tiles(group, groups, rows.device)
        result, lse, maximum = _attend(tiles, rows, k, v, layout, options, sinks, k_scale, v_scale)
        flat_out[tiles.source] = tiles.collect(result)
        flat_lse[tiles.source] = tiles.collect(lse[..., None])[..., 0]
        maxima = torch.maximum(maxima, maximum)

    result = flat_out.to(options.out_dtype).view(*q.shape[:-1], v_dim)
    lse = flat_lse.view(q.shape[0], q.shape[1], heads).transpose(1, 2) if dense else flat_lse.t()
    if out is not None:
        result = out.copy_(result)
    return result, lse.contiguous(), maxima if options.return_max_logits else maxima.new_empty(0)


def _grouped(every: list[Sequence], groups: int) -> list[list[Sequence]]:
    """Sequences to run together: each large one alone, small ones by their tile count rounded up."""
    together: dict[int, list[Sequence]] = {}
    for sequence in every:
        if sequence.num_q == 0:
            continue
        count = _tile_span(sequence, groups)[1]
        key = -1 - sequence.index if count >= _TILES_ALONE else 1 << (count - 1).bit_length()
        together.setdefault(max(key, 2) if key > 0 else key, []).append(sequence)
    return list(together.values())


def _rows_a_position(groups: int) -> int:
    return 1 << (groups - 1).bit_length()


def _tile_span(sequence: Sequence, groups: int) -> tuple[int, int]:
    """First tile (in absolute tile units) and number of tiles of a sequence."""
    pitch = _rows_a_position(groups)
    first = sequence.first_position * pitch // TILE_ROWS
    last = ((sequence.first_position + sequence.num_q) * pitch - 1) // TILE_ROWS
    return first, last - first + 1


class _Tiles:
    """Query rows of a group of sequences, laid out ``[n, Hkv, tiles, TILE_ROWS]``.

    Row ``r`` of a sequence's tiles is the pair (position ``r // pitch``, group head ``r % pitch``) in
    absolute units, so a query lies at the same place of a tile in prefill, in any chunk, and in decode.
    """

    def __init__(self, group: list[Sequence], groups: int, device: torch.device) -> None:
        spans = [_tile_span(s, groups) for s in group]
        self.group, self.groups, self.pitch = group, groups, _rows_a_position(groups)
        self.count = max(count for _, count in spans)
        source: list[int] = []
        target: list[int] = []
        for n, (s, (first, _)) in enumerate(zip(group, spans, strict=True)):
            source += range(s.q_row, s.q_row + s.num_q)
            begin = (n * self.count - first) * TILE_ROWS + s.first_position * self.pitch
            target += range(begin, begin + s.num_q * self.pitch, self.pitch)
        self.source = torch.tensor(source, device=device)
        self._target = torch.tensor(target, device=device)[:, None] + torch.arange(groups, device=device)
        firsts = torch.tensor([first for first, _ in spans], device=device)[:, None] * TILE_ROWS
        packed = firsts + torch.arange(self.count * TILE_ROWS, device=device)
        self.positions = torch.div(packed, self.pitch, rounding_mode="floor")  # [n, rows]
        self.head = packed % self.pitch  # [n, rows], the head inside its group
        begin_at = torch.tensor([s.first_position for s in group], device=device)[:, None]
        end_at = begin_at + torch.tensor([s.num_q for s in group], device=device)[:, None]
        self.real = (self.positions >= begin_at) & (self.positions < end_at) & (self.head < groups)
        self.first_positions = [first * TILE_ROWS // self.pitch for first, _ in spans]

    def spread(self, rows: Tensor) -> Tensor:
        """``[T, Hq, D]`` -> fp32 ``[n, Hkv, tiles, TILE_ROWS, D]``; places without a query are 0."""
        heads, dim = rows.shape[-2] // self.groups, rows.shape[-1]
        picked = rows[self.source].float().view(-1, heads, self.groups, dim).transpose(1, 2)
        buffer = picked.new_zeros(len(self.group) * self.count * TILE_ROWS, heads, dim)
        buffer[self._target] = picked
        return (
            buffer.view(len(self.group), -1, heads, dim)
            .transpose(1, 2)
            .unflatten(2, (self.count, -1))
            .contiguous()
        )

    def collect(self, tiles: Tensor) -> Tensor:
        """Undo `spread`: ``[n, Hkv, tiles, TILE_ROWS, D]`` -> ``[rows, Hq, D]`` in `source` order."""
        heads, dim = tiles.shape[1], tiles.shape[-1]
        flat = tiles.flatten(2, 3).transpose(1, 2).reshape(-1, heads, dim)
        return flat[self._target].transpose(1, 2).reshape(-1, heads * self.groups, dim)

    def head_values(self, per_head: Tensor) -> Tensor:
        """``[Hq]`` -> ``[n, Hkv, tiles, TILE_ROWS]``: the value of each row's head."""
        head = self.head.clamp(max=self.groups - 1)
        values = per_head.float().view(-1, self.groups)[:, head]  # [Hkv, n, rows]
        return values.transpose(0, 1).unflatten(-1, (self.count, TILE_ROWS)).contiguous()

    def head_maxima(self, row_maxima: Tensor, live: slice) -> Tensor:
        """``[n, Hkv, blocks, tiles, TILE_ROWS]`` maxima of some tiles' rows -> ``[Hkv, G]``."""
        head = self.head.unflatten(-1, (self.count, TILE_ROWS))[:, None, None, live]
        return torch.stack(
            [torch.where(head == g, row_maxima, -torch.inf).amax((0, 2, 3, 4)) for g in range(self.groups)],
            dim=-1,
        )


def _attend(
    tiles: _Tiles,
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    options: Options,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    queries = tiles.spread(rows)
    shape = queries.shape[:-1]
    total = _fresh(shape, v.shape[-1], queries)
    if sinks is not None:
        total = (tiles.head_values(sinks), torch.ones_like(total[1]), total[2])
    maximum = queries.new_full((shape[1], tiles.groups), -torch.inf)

    alone = tiles.count >= _TILES_ALONE
    first, stop = _block_range(tiles, options)
    per_split = options.split_k // options.block_k
    for begin in range(first, stop):
        if begin != first and begin % per_split:
            continue  # not the first block of a split
        end = min(stop, (begin // per_split + 1) * per_split)
        positions = torch.arange(begin * options.block_k, end * options.block_k, device=rows.device)
        gather = KeyGather(tiles.group, positions, options.block_k, layout, k.shape[1])
        keys = gather.blocks(k, k_scale, zero_invisible=False)
        values = gather.blocks(v, v_scale, zero_invisible=True)
        state = _fresh(shape, v.shape[-1], queries)
        step = 1 if alone else end - begin
        for block in range(begin, end, step):
            live = _live_tiles(tiles, block, options) if alone else slice(0, tiles.count)
            if live.start == live.stop:
                continue
            here = slice(block - begin, block - begin + step)
            seen = _visible(tiles, gather, positions, here, live, options)
            parts = _partials(queries[:, :, live], keys[:, :, here], values[:, :, here], seen, options)
            if options.return_max_logits:
                maximum = torch.maximum(maximum, tiles.head_maxima(parts[0], live))
            for j in range(step):
                merged = _merge(_at(state, live), _at(parts, j))
                for old, new in zip(state, merged, strict=True):
                    old[:, :, live] = new
        total = _merge(total, state)
    m, l, acc = total
    empty = l == 0
    out = torch.where(empty[..., None], 0.0, acc / torch.where(empty, 1.0, l)[..., None])
    lse = torch.where(empty, -torch.inf, m + torch.log(torch.where(empty, 1.0, l)))
    return out, lse, maximum.flatten()


def _fresh(shape: torch.Size, v_dim: int, like: Tensor) -> State:
    return like.new_full(shape, -torch.inf), like.new_zeros(shape), like.new_zeros(*shape, v_dim)


def _at(state: State, index: int | slice) -> State:
    """Some tiles of a state, or one block of per-block states."""
    m, l, acc = state
    return m[:, :, index], l[:, :, index], acc[:, :, index]


def _block_range(tiles: _Tiles, options: Options) -> tuple[int, int]:
    """Key blocks (absolute) that any row of the group can see."""
    begins, ends = [], []
    for s in tiles.group:
        low, high = s.kv_start, s.kv_start + s.num_k
        if options.window_left >= 0:
            low = max(low, s.first_position - options.window_left)
        if options.window_right >= 0:
            high = min(high, s.first_position + s.num_q + options.window_right)
        if low < high:
            begins.append(low // options.block_k)
            ends.append(-(-high // options.block_k))
    return (min(begins), max(ends)) if begins else (0, 0)


def _live_tiles(tiles: _Tiles, block: int, options: Options) -> slice:
    """Tiles with a row that the window lets see some key of the block, over all sequences of the group.

    Leaving a tile out is exact: a block that is masked for a row leaves its state untouched bit for bit.
    """
    low, high = block * options.block_k, (block + 1) * options.block_k - 1
    start, stop = tiles.count, 0
    for first in tiles.first_positions:
        begin, end = 0, tiles.count
        if options.window_right >= 0:  # needs position >= low - window_right
            begin = (low - options.window_right - first) * tiles.pitch // TILE_ROWS
        if options.window_left >= 0:  # needs position <= high + window_left
            end = (high + options.window_left + 1 - first) * tiles.pitch // TILE_ROWS + 1
        # `first` is rounded down, so widen by one tile: too many is slower, too few is wrong
        start, stop = min(start, max(begin - 1, 0)), max(stop, min(end + 1, tiles.count))
    return slice(start, max(start, stop))


def _visible(
    tiles: _Tiles, gather: KeyGather, positions: Tensor, blocks: slice, live: slice, options: Options
) -> Tensor:
    """bool ``[n, blocks, tiles, TILE_ROWS, block_k]``: which keys each row sees."""
    rows = slice(live.start * TILE_ROWS, live.stop * TILE_ROWS)
    keys = slice(blocks.start * options.block_k, blocks.stop * options.block_k)
    p = tiles.positions[:, rows, None]
    c = positions[keys]
    seen = tiles.real[:, rows, None] & gather.visible[:, None, keys]
    if options.window_right >= 0:
        seen = seen & (c <= p + options.window_right)
    if options.window_left >= 0:
        seen = seen & (c >= p - options.window_left)
    return seen.unflatten(2, (-1, options.block_k)).transpose(1, 2).unflatten(2, (-1, TILE_ROWS))


def _partials(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, options: Options) -> State:
    """Each block's own softmax state for each tile.

    ``torch.exp`` and not ``exp2``: the latter's vector and scalar code differ, so its bits depend on where
    an element lies in the tensor.

    Args:
        queries: ``[n, Hkv, tiles, TILE_ROWS, D]``.
        keys: ``[n, Hkv, blocks, block_k, D]``, contiguous; ``values`` too.
        values: see ``keys``.
        seen: ``[n, blocks, tiles, TILE_ROWS, block_k]``.
        options: of the call.

    Returns:
        m, l ``[n, Hkv, blocks, tiles, TILE_ROWS]`` and acc ``[.., Dv]``.
    """
    tiled = queries[:, :, None].expand(-1, -1, keys.shape[2], -1, -1, -1)
    scores = _product(tiled, keys, transposed=True).mul_(options.scale)
    if options.softcap:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    scores = scores.masked_fill_(~seen[:, None], -torch.inf)
    m = scores.amax(-1)
    safe = torch.where(m == -torch.inf, 0.0, m)
    p = scores.sub_(safe[..., None]).exp_()
    return m, p.sum(-1), _product(p, values, transposed=False)


def _product(tiles: Tensor, matrices: Tensor, *, transposed: bool) -> Tensor:
    """One batch of fixed ``[8, X] x [X, Y]`` products, whatever the batch.

    The right operands always have one memory layout (rows of a contiguous ``[block_k, D]``, transposed as a
    view for the scores): another layout may pick another kernel, and so other bits.

    Args:
        tiles: ``[n, Hkv, blocks, tiles, TILE_ROWS, X]``.
        matrices: ``[n, Hkv, blocks, block_k, D]``, contiguous.
        transposed: multiply by the matrices' transposes.
    """
    *lead, count, _, _ = tiles.shape
    if count < _TILES_ALONE:
        wide = matrices[:, :, :, None].expand(-1, -1, -1, count, -1, -1).reshape(-1, *matrices.shape[-2:])
        flat = tiles.reshape(-1, *tiles.shape[-2:])
        if alone := flat.shape[0] == 1:  # a batch of one takes another code path, and rounds otherwise
            flat, wide = flat.expand(2, -1, -1).contiguous(), wide.expand(2, -1, -1).contiguous()
        found = torch.bmm(flat, wide.transpose(1, 2) if transposed else wide)
        return (found[:1] if alone else found).view(*lead, count, TILE_ROWS, -1)
    flat = tiles.reshape(-1, *tiles.shape[-3:])
    parts = []
    for some, matrix in zip(flat, matrices.flatten(0, 2), strict=True):
        shared = matrix.expand(count, -1, -1)
        parts.append(torch.bmm(some, shared.transpose(1, 2) if transposed else shared))
    return torch.stack(parts).view(*lead, count, TILE_ROWS, -1)


def _merge(total: State, part: State) -> State:
    """Fold one state into another; a row that the part knows nothing of keeps its state exactly."""
    (big_m, big_l, big_acc), (m, l, acc) = total, part
    new_m = torch.maximum(big_m, m)
    safe = torch.where(new_m == -torch.inf, 0.0, new_m)
    a, b = torch.exp(big_m - safe), torch.exp(m - safe)
    return new_m, big_l * a + l * b, big_acc * a[..., None] + acc * b[..., None]

"""Every refusal of the public functions, with all its reasons in one message.

Only shapes, dtypes and devices are looked at: values live on the device, and reading them would stop it.
On a CPU, and with ``RL_ATTN_DEBUG=1`` anywhere, offsets, tables and positions are read and checked too.
"""

from __future__ import annotations

import math
import os
from itertools import pairwise

import torch
from torch import Tensor

from rl_attn_plugin.types import CausalAlignment, Layout, Rope

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


class Reasons:
    """Collects what is wrong with a call, then raises it all at once."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._reasons: list[str] = []

    def need(self, condition: bool, template: str, *values: object) -> bool:
        """Note ``template.format(*values)`` unless ``condition`` holds; returns the condition.

        The text is made only on failure: it costs time on a hot path, and torch.compile cannot format
        symbolic values.
        """
        if not condition:
            self._reasons.append(template.format(*values))
        return condition

    def done(self) -> None:
        """Raise ValueError if anything was noted."""
        if not self._reasons:
            return
        if len(self._reasons) == 1:
            raise ValueError(f"{self._function}: {self._reasons[0]}")
        listed = "\n".join(f"  - {reason}" for reason in self._reasons)
        raise ValueError(f"{self._function}: {len(self._reasons)} arguments are wrong:\n{listed}")


def shape(x: Tensor) -> list[int]:
    return list(x.shape)


def check_heads(why: Reasons, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Dtypes, devices, head counts and head dims of q, k, v."""
    why.need(q.dtype in DTYPES, "q must be float16, bfloat16 or float32, got {}", q.dtype)
    if k.dtype != torch.float8_e4m3fn:
        why.need(k.dtype == q.dtype, "k must have q's dtype {}, got {}", q.dtype, k.dtype)
    why.need(v.dtype == k.dtype, "v must have k's dtype {}, got {}", k.dtype, v.dtype)
    for name, x in (("k", k), ("v", v)):
        why.need(x.device == q.device, "{} must be on q's device {}, got {}", name, q.device, x.device)
    dim, v_dim = q.shape[-1], v.shape[-1]
    if dim == 576 and v_dim == 512:
        raise NotImplementedError(
            "absorbed MLA (head dims 576/512) is not supported: give the expanded heads (192/128)"
        )
    why.need(1 <= dim <= MAX_HEAD_DIM, "head dim D must be 1 to {}, got {}", MAX_HEAD_DIM, dim)
    why.need(1 <= v_dim <= MAX_HEAD_DIM, "head dim Dv must be 1 to {}, got {}", MAX_HEAD_DIM, v_dim)
    why.need(k.shape[-1] == dim, "k must have q's head dim {}, got {}", dim, k.shape[-1])
    why.need(
        k.shape[-2] == v.shape[-2], "k and v must have equal heads, got {} and {}", k.shape[-2], v.shape[-2]
    )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    why.need(
        kv_heads > 0 and heads % kv_heads == 0,
        "query heads must be a multiple of key/value heads, got {} and {}",
        heads,
        kv_heads,
    )


def check_options(
    why: Reasons,
    q: Tensor,
    *,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
    causal_alignment: CausalAlignment,
    sinks: Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:
    """The options that every attention function shares."""
    why.need(scale is None or abs(scale) < math.inf, "scale must be finite, got {}", scale)
    reach: list[object] = list(window)  # whatever a caller gave
    why.need(
        len(reach) == 2 and all(isinstance(x, int) and x >= -1 for x in reach),
        "window must be (left, right) with integers of at least -1, got {}",
        window,
    )
    why.need(0 <= softcap < math.inf, "softcap must be 0 (off) or positive, got {}", softcap)
    why.need(
        causal_alignment in ("bottom_right", "top_left"),
        "causal_alignment must be 'bottom_right' or 'top_left', got {!r}",
        causal_alignment,
    )
    if sinks is not None:
        why.need(
            shape(sinks) == [q.shape[-2]], "sinks must be [Hq] = [{}], got {}", q.shape[-2], shape(sinks)
        )
        why.need(sinks.is_floating_point(), "sinks must be floating point, got {}", sinks.dtype)
        why.need(sinks.device == q.device, "sinks must be on q's device {}, got {}", q.device, sinks.device)
    if out_dtype is not None:
        why.need(out_dtype in DTYPES, "out_dtype must be float16, bfloat16 or float32, got {}", out_dtype)


def _display(expected: list[int | None]) -> str:
    return "[" + ", ".join("any" if e is None else str(e) for e in expected) + "]"


def check_ints(
    why: Reasons, name: str, x: Tensor | None, expected: list[int | None], device: torch.device
) -> bool:
    """An int32 tensor on ``device`` with the given shape (None matches any size)."""
    if x is None:
        return True
    fits = x.dim() == len(expected) and all(
        e is None or e == n for e, n in zip(expected, x.shape, strict=True)
    )
    return all(
        (
            why.need(x.dtype == torch.int32, "{} must be int32, got {}: call {}.int()", name, x.dtype, name),
            why.need(x.device == device, "{} must be on q's device {}, got {}", name, device, x.device),
            fits or why.need(False, "{} must have shape {}, got {}", name, _display(expected), shape(x)),
        )
    )


def check_lengths(why: Reasons, q: Tensor, cache: Tensor, layout: Layout) -> None:
    """The offsets, lengths and bounds of a packed or paged call; ``cache`` is k."""
    cu_q = layout.cu_seqlens_q
    if cu_q is None:
        return
    sound = check_ints(why, "cu_seqlens_q", cu_q, [None], q.device)
    if cu_q.dim() != 1 or cu_q.shape[0] < 1:
        why.need(False, "cu_seqlens_q must be [B + 1], got {}", shape(cu_q))
        return
    batch = cu_q.shape[0] - 1
    sound &= check_ints(why, "cu_seqlens_k", layout.cu_seqlens_k, [batch + 1], q.device)
    sound &= check_ints(why, "seqused_q", layout.seqused_q, [batch], q.device)
    sound &= check_ints(
        why, "seqused_k" if layout.block_table is None else "seqlens_k", layout.seqused_k, [batch], q.device
    )
    sound &= check_ints(why, "kv_start", layout.kv_start, [batch], q.device)
    sound &= check_ints(why, "block_table", layout.block_table, [batch, None], q.device)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        bound = getattr(layout, name)
        why.need(bound >= 0, "{} must be a non-negative host int, got {}", name, bound)
    if layout.block_table is None:
        sound &= why.need(layout.cu_seqlens_k is not None, "cu_seqlens_k must be int32 [B + 1], got None")
    if sound and _values_are_read(q):
        _check_values(why, q, layout, cache)


def _values_are_read(x: Tensor) -> bool:
    """On a CPU they lie here anyway; on a device reading them would stop it, and is done on request."""
    if torch.compiler.is_compiling():
        return False
    return x.device.type == "cpu" or os.environ.get("RL_ATTN_DEBUG") == "1"


def _check_values(why: Reasons, q: Tensor, layout: Layout, cache: Tensor) -> None:
    """The values of offsets, lengths and the table."""
    starts = [] if layout.kv_start is None else layout.kv_start.tolist()
    why.need(min(starts, default=0) >= 0, "kv_start must not be negative, got {}", starts)
    if layout.block_table is not None and layout.seqused_k is not None:
        pages, size = cache.shape[:2]
        keys, width = layout.seqused_k.tolist(), layout.block_table.shape[1]
        if not why.need(min(keys, default=0) >= 0, "seqlens_k must not be negative, got {}", keys):
            return
        why.need(
            max(keys, default=0) <= layout.max_seqlen_k,
            "max_seqlen_k must be at least {}, got {}",
            max(keys, default=0),
            layout.max_seqlen_k,
        )
        if why.need(
            max(keys, default=0) <= width * size,
            "block_table must cover seqlens_k {} with pages of {}, got {} page{}",
            keys,
            size,
            width,
            "s" * (width != 1),
        ):
            named = [
                p
                for row, n in zip(layout.block_table.tolist(), keys, strict=True)
                for p in row[: -(-n // size)]
            ]
            why.need(
                all(0 <= p < pages for p in named),
                "block_table must name pages 0 to {} where sequences have keys, got {}",
                pages - 1,
                named,
            )
    sides: list[tuple[str, Tensor | None, Tensor | None, int, int]] = [
        ("cu_seqlens_q", layout.cu_seqlens_q, layout.seqused_q, layout.max_seqlen_q, q.shape[0]),
        ("cu_seqlens_k", layout.cu_seqlens_k, layout.seqused_k, layout.max_seqlen_k, cache.shape[0]),
    ]
    for name, cu, used, bound, rows in sides:
        if cu is None:
            continue
        values: list[int] = cu.tolist()
        lengths = [b - a for a, b in pairwise(values)]
        why.need(
            values[0] >= 0 and min(lengths, default=0) >= 0 and values[-1] <= rows,
            "{} must ascend within the tensor's {} rows, got {}",
            name,
            rows,
            values,
        )
        real: list[int] = lengths if used is None else used.tolist()
        why.need(
            all(0 <= r <= n for r, n in zip(real, lengths, strict=True)),
            "seqused must lie within the lengths of {} {}, got {}",
            name,
            lengths,
            real,
        )
        why.need(
            max(real, default=0) <= bound,
            "the bound of {} must be at least {}, got {}",
            name,
            max(real, default=0),
            bound,
        )


def check_slots(why: Reasons, slots: Tensor, cache: Tensor) -> None:
    """Slots of a cache write: -1, or a place in the cache."""
    if slots.dtype not in (torch.int32, torch.int64) or not slots.numel() or not _values_are_read(slots):
        return
    low, high = (int(value) for value in slots.aminmax())
    room = cache.shape[0] * cache.shape[1]
    why.need(
        low >= -1 and high < room,
        "slot_mapping must be -1 (skipped) or a slot below {}, got {} to {}",
        room,
        low,
        high,
    )


def check_mask(why: Reasons, q: Tensor, k: Tensor, mask: Tensor | None) -> None:
    """The padding mask of a dense call."""
    if mask is None:
        return
    expected = [k.shape[0], k.shape[1]]
    why.need(shape(mask) == expected, "key_padding_mask must be [B, Sk] = {}, got {}", expected, shape(mask))
    why.need(mask.dtype == torch.bool, "key_padding_mask must be bool with True = keep, got {}", mask.dtype)
    why.need(
        mask.device == q.device, "key_padding_mask must be on q's device {}, got {}", q.device, mask.device
    )


def check_scale(why: Reasons, name: str, scale: Tensor | None, cache: Tensor) -> None:
    """The scale of an e4m3 cache: scalar or one a kv head."""
    if scale is None:
        why.need(
            cache.dtype != torch.float8_e4m3fn, "{} must be given with a float8_e4m3fn cache, got None", name
        )
        return
    why.need(scale.is_floating_point(), "{} must be floating point, got {}", name, scale.dtype)
    why.need(
        scale.device == cache.device,
        "{} must be on the cache's device {}, got {}",
        name,
        cache.device,
        scale.device,
    )
    heads = cache.shape[-2]
    why.need(
        scale.numel() in (1, heads), "{} must be a scalar or [Hkv] = [{}], got {}", name, heads, shape(scale)
    )


def check_rope(why: Reasons, x: Tensor, rope: Rope, name: str = "x") -> None:
    """The tables and positions of a rotation of ``x [..., H, D]``."""
    dim = x.shape[-1]
    rotary = dim if rope.rotary_dim is None else rope.rotary_dim
    why.need(
        0 < rotary <= dim and rotary % 2 == 0,
        "rope.rotary_dim must be even and 2 to D = {}, got {}",
        dim,
        rotary,
    )
    for table, values in (("cos", rope.cos), ("sin", rope.sin)):
        why.need(
            values.dim() == 2 and values.shape[1] * 2 == rotary,
            "rope.{} must be [max_position, rotary_dim / 2 = {}], got {}",
            table,
            rotary // 2,
            shape(values),
        )
        why.need(values.dtype == torch.float32, "rope.{} must be float32, got {}", table, values.dtype)
        why.need(
            values.device == x.device,
            "rope.{} must be on {}'s device {}, got {}",
            table,
            name,
            x.device,
            values.device,
        )
    why.need(
        shape(rope.cos) == shape(rope.sin),
        "rope.cos and rope.sin must have equal shapes, got {} and {}",
        shape(rope.cos),
        shape(rope.sin),
    )
    _check_positions(why, "positions", rope.positions, x, name, rope.cos.shape[0])


def check_key_positions(why: Reasons, k: Tensor, rope: Rope) -> None:
    """Positions for keys that the call rotates: the queries', or ones of their own."""
    if rope.positions_k is not None:
        _check_positions(why, "positions_k", rope.positions_k, k, "k", rope.cos.shape[0])
        return
    why.need(
        shape(rope.positions) == shape(k)[:-2],
        "rope.positions_k must be given where k's token shape {} is not that of rope.positions {}, got None",
        shape(k)[:-2],
        shape(rope.positions),
    )


def _check_positions(why: Reasons, field: str, positions: Tensor, x: Tensor, name: str, rows: int) -> None:
    why.need(
        positions.dtype in (torch.int32, torch.int64),
        "rope.{} must be int32 or int64, got {}",
        field,
        positions.dtype,
    )
    why.need(
        positions.device == x.device,
        "rope.{} must be on {}'s device {}, got {}",
        field,
        name,
        x.device,
        positions.device,
    )
    why.need(
        shape(positions) == shape(x)[:-2],
        "rope.{} must have {}'s token shape {}, got {}",
        field,
        name,
        shape(x)[:-2],
        shape(positions),
    )
    if positions.dtype in (torch.int32, torch.int64) and positions.numel() and _values_are_read(positions):
        low, high = (int(value) for value in positions.aminmax())
        why.need(
            low >= 0 and high < rows, "rope.{} must lie in [0, {}), got {} to {}", field, rows, low, high
        )

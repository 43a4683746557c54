"""Every refusal of the public functions, with all its reasons in one message.

Only shapes, dtypes and devices are looked at: values live on the device, and reading them would stop it.
With ``RL_ATTN_DEBUG=1`` the offsets and tables are read and checked too.
"""

from __future__ import annotations

import math
import os

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

    def need(self, condition: bool, reason: str) -> bool:
        """Note ``reason`` unless ``condition`` holds; returns the condition."""
        if not condition:
            self._reasons.append(reason)
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
    why.need(q.dtype in DTYPES, f"q must be float16, bfloat16 or float32, got {q.dtype}")
    if k.dtype != torch.float8_e4m3fn:
        why.need(k.dtype == q.dtype, f"k must have q's dtype {q.dtype}, got {k.dtype}")
    why.need(v.dtype == k.dtype, f"v must have k's dtype {k.dtype}, got {v.dtype}")
    for name, x in (("k", k), ("v", v)):
        why.need(x.device == q.device, f"{name} must be on q's device {q.device}, got {x.device}")
    dim, v_dim = q.shape[-1], v.shape[-1]
    if dim == 576 and v_dim == 512:
        raise NotImplementedError(
            "absorbed MLA (head dims 576/512) is not supported: give the expanded heads (192/128)"
        )
    why.need(1 <= dim <= MAX_HEAD_DIM, f"head dim D must be 1 to {MAX_HEAD_DIM}, got {dim}")
    why.need(1 <= v_dim <= MAX_HEAD_DIM, f"head dim Dv must be 1 to {MAX_HEAD_DIM}, got {v_dim}")
    why.need(k.shape[-1] == dim, f"k must have q's head dim {dim}, got {k.shape[-1]}")
    why.need(k.shape[-2] == v.shape[-2], f"k and v must have equal heads, got {k.shape[-2]} and {v.shape[-2]}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    why.need(
        kv_heads > 0 and heads % kv_heads == 0,
        f"query heads must be a multiple of key/value heads, got {heads} and {kv_heads}",
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
    why.need(scale is None or math.isfinite(scale), f"scale must be finite, got {scale}")
    why.need(
        len(window) == 2 and all(isinstance(x, int) and x >= -1 for x in window),
        f"window must be (left, right) with integers of at least -1, got {window}",
    )
    why.need(math.isfinite(softcap) and softcap >= 0, f"softcap must be 0 (off) or positive, got {softcap}")
    why.need(
        causal_alignment in ("bottom_right", "top_left"),
        f"causal_alignment must be 'bottom_right' or 'top_left', got {causal_alignment!r}",
    )
    if sinks is not None:
        why.need(shape(sinks) == [q.shape[-2]], f"sinks must be [Hq] = [{q.shape[-2]}], got {shape(sinks)}")
        why.need(sinks.is_floating_point(), f"sinks must be floating point, got {sinks.dtype}")
        why.need(sinks.device == q.device, f"sinks must be on q's device {q.device}, got {sinks.device}")
    if out_dtype is not None:
        why.need(out_dtype in DTYPES, f"out_dtype must be float16, bfloat16 or float32, got {out_dtype}")


def check_ints(why: Reasons, name: str, x: Tensor | None, expected: list[int | None], device: torch.device) -> bool:
    """An int32 tensor on ``device`` with the given shape (None matches any size)."""
    if x is None:
        return True
    fits = x.dim() == len(expected) and all(e is None or e == n for e, n in zip(expected, x.shape, strict=True))
    wanted = "[" + ", ".join("any" if e is None else str(e) for e in expected) + "]"
    return all(
        (
            why.need(x.dtype == torch.int32, f"{name} must be int32, got {x.dtype}: call {name}.int()"),
            why.need(x.device == device, f"{name} must be on q's device {device}, got {x.device}"),
            why.need(fits, f"{name} must have shape {wanted}, got {shape(x)}"),
        )
    )


def check_lengths(why: Reasons, q: Tensor, layout: Layout) -> None:
    """The offsets, lengths and bounds of a packed or paged call."""
    cu_q = layout.cu_seqlens_q
    if cu_q is None:
        return
    sound = check_ints(why, "cu_seqlens_q", cu_q, [None], q.device)
    if cu_q.dim() != 1 or cu_q.shape[0] < 1:
        why.need(False, f"cu_seqlens_q must be [B + 1], got {shape(cu_q)}")
        return
    batch = cu_q.shape[0] - 1
    sound &= check_ints(why, "cu_seqlens_k", layout.cu_seqlens_k, [batch + 1], q.device)
    sound &= check_ints(why, "seqused_q", layout.seqused_q, [batch], q.device)
    sound &= check_ints(why, "seqused_k" if layout.block_table is None else "seqlens_k", layout.seqused_k, [batch], q.device)
    sound &= check_ints(why, "kv_start", layout.kv_start, [batch], q.device)
    sound &= check_ints(why, "block_table", layout.block_table, [batch, None], q.device)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        bound = getattr(layout, name)
        why.need(bound >= 0, f"{name} must be a non-negative host int, got {bound}")
    if sound and os.environ.get("RL_ATTN_DEBUG") == "1":
        _check_values(why, layout)


def _check_values(why: Reasons, layout: Layout) -> None:
    """Read the offsets (this synchronises) and check them."""
    for name, cu, used, bound in (
        ("cu_seqlens_q", layout.cu_seqlens_q, layout.seqused_q, layout.max_seqlen_q),
        ("cu_seqlens_k", layout.cu_seqlens_k, layout.seqused_k, layout.max_seqlen_k),
    ):
        if cu is None:
            continue
        values = cu.tolist()
        lengths = [b - a for a, b in zip(values, values[1:], strict=False)]
        why.need(values[0] >= 0 and min(lengths, default=0) >= 0, f"{name} must ascend from 0, got {values}")
        real = lengths if used is None else used.tolist()
        why.need(
            all(0 <= r <= n for r, n in zip(real, lengths, strict=True)),
            f"seqused must lie within the lengths of {name} {lengths}, got {real}",
        )
        why.need(max(real, default=0) <= bound, f"the bound of {name} must be at least {max(real, default=0)}, got {bound}")


def check_mask(why: Reasons, q: Tensor, k: Tensor, mask: Tensor | None) -> None:
    """The padding mask of a dense call."""
    if mask is None:
        return
    expected = [k.shape[0], k.shape[1]]
    why.need(shape(mask) == expected, f"key_padding_mask must be [B, Sk] = {expected}, got {shape(mask)}")
    why.need(mask.dtype == torch.bool, f"key_padding_mask must be bool with True = keep, got {mask.dtype}")
    why.need(mask.device == q.device, f"key_padding_mask must be on q's device {q.device}, got {mask.device}")


def check_scale(why: Reasons, name: str, scale: Tensor | None, cache: Tensor) -> None:
    """The scale of an e4m3 cache: scalar or one a kv head."""
    if scale is None:
        why.need(
            cache.dtype != torch.float8_e4m3fn, f"{name} must be given with a float8_e4m3fn cache, got None"
        )
        return
    why.need(scale.is_floating_point(), f"{name} must be floating point, got {scale.dtype}")
    why.need(scale.device == cache.device, f"{name} must be on the cache's device {cache.device}, got {scale.device}")
    heads = cache.shape[-2]
    why.need(scale.numel() in (1, heads), f"{name} must be a scalar or [Hkv] = [{heads}], got {shape(scale)}")


def check_rope(why: Reasons, x: Tensor, rope: Rope, name: str = "x") -> None:
    """The tables and positions of a rotation of ``x [..., H, D]``."""
    dim = x.shape[-1]
    rotary = dim if rope.rotary_dim is None else rope.rotary_dim
    why.need(
        0 < rotary <= dim and rotary % 2 == 0,
        f"rope.rotary_dim must be even and 2 to D = {dim}, got {rotary}",
    )
    for table, values in (("cos", rope.cos), ("sin", rope.sin)):
        why.need(
            values.dim() == 2 and values.shape[1] * 2 == rotary,
            f"rope.{table} must be [max_position, rotary_dim / 2 = {rotary // 2}], got {shape(values)}",
        )
        why.need(values.dtype == torch.float32, f"rope.{table} must be float32, got {values.dtype}")
        why.need(values.device == x.device, f"rope.{table} must be on {name}'s device {x.device}, got {values.device}")
    positions = rope.positions
    why.need(
        positions.dtype in (torch.int32, torch.int64), f"rope.positions must be int32 or int64, got {positions.dtype}"
    )
    why.need(
        positions.device == x.device, f"rope.positions must be on {name}'s device {x.device}, got {positions.device}"
    )
    why.need(
        shape(positions) == shape(x)[:-2],
        f"rope.positions must have {name}'s token shape {shape(x)[:-2]}, got {shape(positions)}",
    )

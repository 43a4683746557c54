"""Public functions around the cache: merging partials, writing keys and values, planning a step."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_attn_plugin import validation
from rl_attn_plugin.ops import contracts as contracts  # registers the operators
from rl_attn_plugin.ops.dispatch import arch, implementation, resolve_impl
from rl_attn_plugin.ops.rope import apply_rope
from rl_attn_plugin.types import AttentionOutput, Impl, PagedPlan, Rope, Schedule, default_schedule


def merge_attention(outs: Tensor, lses: Tensor, *, impl: Impl | str = Impl.AUTO) -> AttentionOutput:
    """Merge partial attentions over disjoint keys, in order along the first dimension.

    Normalised partials and natural-log LSE in, the same out; fp32 arithmetic, differentiable. A ``-inf``
    partial leaves the others exactly as they were, two give ``(0, -inf)``, and ``+inf`` with a zero output
    (some libraries' empty row) counts as ``-inf``. Not the same bits as one attention over all keys:
    kernels merge unnormalised states.

    Args:
        outs: ``[P, T, Hq, Dv]`` or ``[P, B, S, Hq, Dv]``; use ``out_dtype=torch.float32`` for partials.
        lses: fp32 ``[P, Hq, T]`` or ``[P, B, Hq, S]``.
        impl: see `flash_attention`.

    Returns:
        ``out`` in ``outs``' dtype and fp32 ``lse``.

    Raises:
        ValueError: with every reason.
    """
    why = validation.Reasons("merge_attention")
    if why.need(
        outs.dim() in (4, 5),
        "outs must be [P, T, Hq, Dv] or [P, B, S, Hq, Dv], got {}",
        validation.shape(outs),
    ):
        *lead, tokens, heads, _ = outs.shape
        expected = [*lead, heads, tokens]
        why.need(
            validation.shape(lses) == expected, "lses must be {}, got {}", expected, validation.shape(lses)
        )
        why.need(outs.shape[0] > 0, "outs must hold at least one partial, got {}", outs.shape[0])
    why.need(outs.dtype in validation.DTYPES, "outs must be float16, bfloat16 or float32, got {}", outs.dtype)
    why.need(lses.dtype == torch.float32, "lses must be float32, got {}", lses.dtype)
    why.need(lses.device == outs.device, "lses must be on outs' device {}, got {}", outs.device, lses.device)
    why.done()
    out, lse = torch.ops.rl_attn.merge_attention(outs, lses, resolve_impl(impl, outs.device).value)
    return AttentionOutput(out, lse)


def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rope: Rope | None = None,
    impl: Impl | str = Impl.AUTO,
) -> None:
    """Write new keys and values into the pages of a cache, in place.

    Args:
        k: ``[T, Hkv, D]``.
        v: ``[T, Hkv, Dv]``.
        k_cache: ``[num_pages, page_size, Hkv, D]``, any strides; k's dtype or float8_e4m3fn with scales.
        v_cache: ``[num_pages, page_size, Hkv, Dv]``.
        slot_mapping: int32 or int64 ``[T]``: ``page * page_size + offset``, or -1 to skip a token.
        k_scale: scalar or ``[Hkv]``: stored = value / scale, saturating.
        v_scale: as ``k_scale``.
        rope: rotate k first, at ``rope.positions [T]``.
        impl: see `flash_attention`.

    Raises:
        ValueError: with every reason.
    """
    why = validation.Reasons("write_kv_cache")
    for name, x in (("k", k), ("v", v)):
        why.need(x.dim() == 3, "{} must be [T, Hkv, D], got {}", name, validation.shape(x))
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        why.need(x.dim() == 4, "{} must be [num_pages, page_size, Hkv, D], got {}", name, validation.shape(x))
    why.done()
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        why.need(
            x.shape[1:] == cache.shape[2:],
            "{} must have {}_cache's heads and head dim {}, got {}",
            name,
            name,
            list(cache.shape[2:]),
            list(x.shape[1:]),
        )
        why.need(
            cache.dtype in (x.dtype, torch.float8_e4m3fn),
            "{}_cache must be {} or torch.float8_e4m3fn, got {}",
            name,
            x.dtype,
            cache.dtype,
        )
        why.need(
            cache.device == x.device,
            "{}_cache must be on {}'s device {}, got {}",
            name,
            name,
            x.device,
            cache.device,
        )
    validation.check_scale(why, "k_scale", k_scale, k_cache)
    validation.check_scale(why, "v_scale", v_scale, v_cache)
    why.need(
        k_cache.shape[:2] == v_cache.shape[:2],
        "k_cache and v_cache must have equal pages, got {} and {}",
        list(k_cache.shape[:2]),
        list(v_cache.shape[:2]),
    )
    why.need(
        validation.shape(slot_mapping) == [k.shape[0]] and k.shape[0] == v.shape[0],
        "k, v and slot_mapping must have equal tokens, got {}, {} and {}",
        k.shape[0],
        v.shape[0],
        validation.shape(slot_mapping),
    )
    why.need(
        slot_mapping.dtype in (torch.int32, torch.int64),
        "slot_mapping must be int32 or int64, got {}",
        slot_mapping.dtype,
    )
    why.need(
        slot_mapping.device == k.device,
        "slot_mapping must be on k's device {}, got {}",
        k.device,
        slot_mapping.device,
    )
    validation.check_slots(why, slot_mapping, k_cache)
    why.done()
    chosen = resolve_impl(impl, k.device)
    if rope is not None:
        k = apply_rope(k, rope, impl=chosen)
    torch.ops.rl_attn.write_kv_cache(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, chosen.value)


def plan_paged(
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    dtype: torch.dtype,
    kv_start: Tensor | None = None,
    impl: Impl | str = Impl.AUTO,
    schedule: Schedule | None = None,
) -> PagedPlan:
    """Spread one step over the device by its real lengths; make it once a step, give it to every layer.

    Without a plan the grid fits the host bounds, so one long sequence among many short ones costs as much as
    many long ones. A plan reads the lengths, which synchronises once; it never changes a bit of a result. It
    holds for all layers of these head counts and dims, whatever their masks.

    Args:
        cu_seqlens_q: int32 ``[B + 1]``.
        seqlens_k: int32 ``[B]``, new tokens included.
        num_heads: Hq.
        num_kv_heads: Hkv.
        head_dim: D.
        v_head_dim: Dv, default D.
        dtype: of q.
        kv_start: int32 ``[B]``, as it will be given to the attention.
        impl: see `flash_attention`; ``"torch"`` needs no plan and gets an empty one.
        schedule: see `flash_attention`.

    Raises:
        ValueError: with every reason.
    """
    why = validation.Reasons("plan_paged")
    if why.need(
        cu_seqlens_q.dim() == 1 and cu_seqlens_q.shape[0] > 0,
        "cu_seqlens_q must be [B + 1], got {}",
        validation.shape(cu_seqlens_q),
    ):
        batch = cu_seqlens_q.shape[0] - 1
        validation.check_ints(why, "cu_seqlens_q", cu_seqlens_q, [batch + 1], cu_seqlens_q.device)
        validation.check_ints(why, "seqlens_k", seqlens_k, [batch], cu_seqlens_q.device)
        validation.check_ints(why, "kv_start", kv_start, [batch], cu_seqlens_q.device)
    why.need(
        num_kv_heads > 0 and num_heads % num_kv_heads == 0,
        "num_heads must be a multiple of num_kv_heads, got {} and {}",
        num_heads,
        num_kv_heads,
    )
    why.need(dtype in validation.DTYPES, "dtype must be float16, bfloat16 or float32, got {}", dtype)
    why.done()
    v_dim = head_dim if v_head_dim is None else v_head_dim
    chosen = resolve_impl(impl, cu_seqlens_q.device)
    if chosen is Impl.TORCH:
        return PagedPlan(None, 0)
    schedule = schedule or default_schedule(head_dim, v_dim, dtype, arch(cu_seqlens_q.device))
    plan: PagedPlan = implementation(chosen.value, "schedule").plan_paged(
        cu_seqlens_q,
        seqlens_k,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_dim,
        dtype=dtype,
        split_k=schedule.split_k,
        kv_start=kv_start,
    )
    return plan

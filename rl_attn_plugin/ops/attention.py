"""The public attention functions: validate, resolve, call."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_attn_plugin import validation
from rl_attn_plugin.ops import contracts
from rl_attn_plugin.ops.dispatch import arch, resolve_impl
from rl_attn_plugin.ops.rope import resolved
from rl_attn_plugin.types import (
    AttentionOutput,
    CausalAlignment,
    Impl,
    Layout,
    Options,
    PagedPlan,
    Rope,
    Schedule,
    default_schedule,
)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    causal_alignment: CausalAlignment = "bottom_right",
    rope: Rope | None = None,
    out_dtype: torch.dtype | None = None,
    return_max_logits: bool = False,
    impl: Impl | str = Impl.AUTO,
    schedule: Schedule | None = None,
) -> AttentionOutput:
    """Attention over dense ``[B, S, H, D]`` tensors of any strides.

    For one schedule, dtype, head dims, architecture and library version, a query row has the same bits
    here, in `flash_attention_varlen` and in `flash_attention_paged`, however its keys were handed over.

    Args:
        q: ``[B, Sq, Hq, D]``, float16, bfloat16 or float32.
        k: ``[B, Sk, Hkv, D]``.
        v: ``[B, Sk, Hkv, Dv]``.
        causal: a query sees keys up to its own position.
        scale: multiplies the scores; default ``D ** -0.5``.
        window: inclusive (left, right) reach around the diagonal; -1 is unlimited.
        softcap: ``s -> softcap * tanh(s / softcap)``; 0 is off.
        sinks: ``[Hq]``, one more logit a row, without a value; its gradient flows.
        key_padding_mask: bool ``[B, Sk]``, True = keep. For left padding prefer offsets and lengths
            (`flash_attention_varlen`), which keep the bits of the unpadded call.
        causal_alignment: where the diagonal starts when Sq != Sk.
        rope: rotate q and k first: the same bits as `apply_rope` before, without its copy of q.
        out_dtype: dtype of ``out``, default q's; float32 gives partials fit for merging.
        return_max_logits: fill ``max_logits``.
        impl: ``"auto"``, ``"triton"`` or ``"torch"``; an explicit one never falls back.
        schedule: the order of arithmetic along the keys; default by head dim, dtype and architecture.

    Returns:
        ``out [B, Sq, Hq, Dv]`` and fp32 ``lse [B, Hq, Sq]``, both differentiable.

    Raises:
        ValueError: with every reason, or when ``impl`` cannot be met.
    """
    why = validation.Reasons("flash_attention")
    _check_ranks(why, q, k, v, 4, "[B, S, H, D]")
    for name, x in (("k", k), ("v", v)):
        why.need(x.shape[0] == q.shape[0], "{} must have q's batch {}, got {}", name, q.shape[0], x.shape[0])
    why.need(
        k.shape[1] == v.shape[1], "k and v must have equal lengths, got {} and {}", k.shape[1], v.shape[1]
    )
    validation.check_mask(why, q, k, key_padding_mask)
    layout = Layout(q.shape[1], k.shape[1], key_padding_mask=key_padding_mask)
    return _attend(
        why, q, k, v, layout,
        causal=causal, scale=scale, window=window, softcap=softcap, sinks=sinks,
        causal_alignment=causal_alignment, rope=rope, out_dtype=out_dtype,
        return_max_logits=return_max_logits, impl=impl, schedule=schedule,
    )  # fmt: skip


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    kv_start: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal_alignment: CausalAlignment = "bottom_right",
    rope: Rope | None = None,
    out_dtype: torch.dtype | None = None,
    return_max_logits: bool = False,
    impl: Impl | str = Impl.AUTO,
    schedule: Schedule | None = None,
) -> AttentionOutput:
    """Attention over packed ``[T, H, D]`` tensors; options as in `flash_attention`.

    Args:
        q: ``[Tq, Hq, D]``.
        k: ``[Tk, Hkv, D]``.
        v: ``[Tk, Hkv, Dv]``.
        cu_seqlens_q: int32 ``[B + 1]`` memory offsets on q's device; sequences may be empty.
        cu_seqlens_k: int32 ``[B + 1]``.
        max_seqlen_q: host int, at least the longest sequence; may be larger.
        max_seqlen_k: host int, the same for keys.
        seqused_q: int32 ``[B]``, real query counts inside the offsets.
        seqused_k: int32 ``[B]``, real key counts.
        kv_start: int32 ``[B]``, absolute index of each sequence's first key.
        causal: see `flash_attention`, as all that follow.
        scale: see `flash_attention`.
        window: see `flash_attention`.
        softcap: see `flash_attention`.
        sinks: see `flash_attention`.
        causal_alignment: see `flash_attention`.
        rope: see `flash_attention`; positions are ``[Tq]``.
        out_dtype: see `flash_attention`.
        return_max_logits: see `flash_attention`.
        impl: see `flash_attention`.
        schedule: see `flash_attention`.

    Returns:
        ``out [Tq, Hq, Dv]`` and fp32 ``lse [Hq, Tq]``. Rows outside every sequence are 0 and ``-inf``.

    Raises:
        ValueError: with every reason, or when ``impl`` cannot be met.
    """
    why = validation.Reasons("flash_attention_varlen")
    _check_ranks(why, q, k, v, 3, "[T, H, D]")
    why.need(
        k.shape[0] == v.shape[0], "k and v must have equal tokens, got {} and {}", k.shape[0], v.shape[0]
    )
    layout = Layout(max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, kv_start)
    return _attend(
        why, q, k, v, layout,
        causal=causal, scale=scale, window=window, softcap=softcap, sinks=sinks,
        causal_alignment=causal_alignment, rope=rope, out_dtype=out_dtype,
        return_max_logits=return_max_logits, impl=impl, schedule=schedule,
    )  # fmt: skip


def flash_attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    kv_start: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    plan: PagedPlan | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal_alignment: CausalAlignment = "bottom_right",
    rope: Rope | None = None,
    out_dtype: torch.dtype | None = None,
    return_max_logits: bool = False,
    impl: Impl | str = Impl.AUTO,
    schedule: Schedule | None = None,
) -> AttentionOutput:
    """Attention of packed queries over a paged cache: decode, chunked prefill, or both in one call.

    Forward only. Write the new tokens first (`write_kv_cache`): ``seqlens_k`` counts them.

    Args:
        q: ``[T, Hq, D]``, any number of new tokens a sequence.
        k_cache: ``[num_pages, page_size, Hkv, D]``, any strides; q's dtype or float8_e4m3fn with scales.
        v_cache: ``[num_pages, page_size, Hkv, Dv]``.
        cu_seqlens_q: int32 ``[B + 1]``.
        seqlens_k: int32 ``[B]``, keys of each sequence, new tokens included.
        block_table: int32 ``[B, max_pages]``; entries past a sequence's length are never read.
        max_seqlen_q: host int, at least the most new tokens of a sequence; may be larger.
        max_seqlen_k: host int, the same for keys.
        kv_start: int32 ``[B]``, absolute index of the first key still in the table (evicting caches).
        k_scale: scalar or ``[Hkv]``: value = stored * scale.
        v_scale: as ``k_scale``.
        out: write the result here and return it.
        plan: from `plan_paged`, made once a step.
        causal: see `flash_attention`, as all that follow.
        scale: see `flash_attention`.
        window: see `flash_attention`.
        softcap: see `flash_attention`.
        sinks: see `flash_attention`.
        causal_alignment: see `flash_attention`.
        rope: rotates q; keys are rotated as they are written (`write_kv_cache`).
        out_dtype: see `flash_attention`.
        return_max_logits: see `flash_attention`.
        impl: see `flash_attention`.
        schedule: see `flash_attention`.

    Returns:
        ``out [T, Hq, Dv]`` and fp32 ``lse [Hq, T]``.

    Raises:
        ValueError: with every reason, or when ``impl`` cannot be met.
        NotImplementedError: when a gradient is asked for.
    """
    why = validation.Reasons("flash_attention_paged")
    why.need(q.dim() == 3, "q must be [T, H, D], got {}", validation.shape(q))
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        why.need(
            cache.dim() == 4,
            "{} must be [num_pages, page_size, Hkv, D], got {}",
            name,
            validation.shape(cache),
        )
    why.done()
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_cache, v_cache)):
        raise NotImplementedError(
            "flash_attention_paged is forward only, got an input that requires grad: "
            "call it under torch.no_grad(), or train with flash_attention_varlen"
        )
    pages = [list(cache.shape[:2]) for cache in (k_cache, v_cache)]
    why.need(
        pages[0] == pages[1], "k_cache and v_cache must have equal pages, got {} and {}", pages[0], pages[1]
    )
    why.need(pages[0][1] > 0, "page_size must be positive, got {}", pages[0][1])
    validation.check_scale(why, "k_scale", k_scale, k_cache)
    validation.check_scale(why, "v_scale", v_scale, v_cache)
    if block_table.dim() == 2 and pages[0][1]:
        room = block_table.shape[1] * pages[0][1]
        why.need(
            block_table.shape[1] > 0 or max_seqlen_k == 0,
            "block_table must be wide enough for max_seqlen_k = {}, got room for {} keys",
            max_seqlen_k,
            room,
        )
    if out is not None:
        expected = [*q.shape[:2], v_cache.shape[-1]]
        dtype = out_dtype or q.dtype
        why.need(validation.shape(out) == expected, "out must be {}, got {}", expected, validation.shape(out))
        why.need(out.dtype == dtype, "out must be {}, got {}", dtype, out.dtype)
        why.need(out.device == q.device, "out must be on q's device {}, got {}", q.device, out.device)
    layout = Layout(max_seqlen_q, max_seqlen_k, cu_seqlens_q, None, None, seqlens_k, kv_start, block_table)
    return _attend(
        why, q, k_cache, v_cache, layout,
        causal=causal, scale=scale, window=window, softcap=softcap, sinks=sinks,
        causal_alignment=causal_alignment, rope=rope, out_dtype=out_dtype,
        return_max_logits=return_max_logits, impl=impl, schedule=schedule,
        k_scale=k_scale, v_scale=v_scale, out=out, plan=plan,
    )  # fmt: skip


def _check_ranks(why: validation.Reasons, q: Tensor, k: Tensor, v: Tensor, rank: int, wanted: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        why.need(x.dim() == rank, "{} must be {}, got {}", name, wanted, validation.shape(x))
    why.done()  # the later checks index shapes


def _attend(
    why: validation.Reasons,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    causal: bool,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
    causal_alignment: CausalAlignment,
    rope: Rope | None,
    out_dtype: torch.dtype | None,
    return_max_logits: bool,
    impl: Impl | str,
    schedule: Schedule | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    plan: PagedPlan | None = None,
) -> AttentionOutput:
    validation.check_heads(why, q, k, v)
    validation.check_options(
        why, q, scale=scale, window=window, softcap=softcap, causal_alignment=causal_alignment, sinks=sinks,
        out_dtype=out_dtype,
    )  # fmt: skip
    validation.check_lengths(why, q, k, layout)
    paged = layout.block_table is not None
    if rope is not None:
        validation.check_rope(why, q, rope, "q")
        if not paged:
            validation.check_key_positions(why, k, rope)
    why.done()

    chosen = resolve_impl(impl, q.device)
    schedule = schedule or default_schedule(q.shape[-1], v.shape[-1], q.dtype, arch(q.device))
    left, right = window
    if causal:
        right = 0
    options = Options(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window_left=left,
        window_right=right,
        top_left=causal_alignment == "top_left",
        softcap=softcap,
        block_k=schedule.block_k,
        split_k=schedule.split_k,
        out_dtype=out_dtype or q.dtype,
        return_max_logits=return_max_logits,
    )
    arguments = (
        q, k, v, sinks, *contracts.layout_arguments(layout),
        *contracts.rope_arguments(None if rope is None else resolved(rope, q.shape[-1])), k_scale, v_scale,
        None if plan is None else plan.work, 0 if plan is None else plan.num_slots,
        *contracts.option_arguments(options, chosen.value),
    )  # fmt: skip
    if out is None:
        result, lse, max_logits = torch.ops.rl_attn.attention_forward(*arguments)
    else:
        lse, max_logits = torch.ops.rl_attn.attention_forward_out(*arguments, out)
        result = out
    return AttentionOutput(result, lse, max_logits if return_max_logits else None)

"""Operator schemas, fakes and gradients. Torch only; the code that computes is imported when an op runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.ops.dispatch import implementation
from rl_attn_plugin.types import Layout, Options, PagedPlan, Rope

_LAYOUT = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? kv_start, "
    "Tensor? block_table, Tensor? key_padding_mask, SymInt max_seqlen_q, SymInt max_seqlen_k"
)
_OPTIONS = (
    "float scale, SymInt window_left, SymInt window_right, bool top_left, float softcap, SymInt block_k, "
    "SymInt split_k, ScalarType out_dtype, bool return_max_logits, str impl"
)
_ROPE = (
    "Tensor? rope_cos, Tensor? rope_sin, Tensor? rope_positions, Tensor? rope_positions_k, bool rope_interleaved, "
    "SymInt rope_dim"
)
_PAGED = "Tensor? k_scale, Tensor? v_scale, Tensor? plan_work, SymInt plan_slots"

torch.library.define(
    "rl_attn::attention_forward",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_LAYOUT}, {_ROPE}, {_PAGED}, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "rl_attn::attention_forward_out",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_LAYOUT}, {_ROPE}, {_PAGED}, {_OPTIONS}, Tensor(a!) out)"
    " -> (Tensor, Tensor)",
)
torch.library.define(
    "rl_attn::attention_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sinks, "
    f"{_LAYOUT}, {_ROPE}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define("rl_attn::merge_attention", "(Tensor outs, Tensor lses, str impl) -> (Tensor, Tensor)")
torch.library.define(
    "rl_attn::write_kv_cache",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor? k_scale, "
    "Tensor? v_scale, str impl) -> ()",
)
torch.library.define(
    "rl_attn::apply_rope",
    "(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool interleaved, SymInt rotary_dim, bool inverse, "
    "str impl) -> Tensor",
)

_NUM_LAYOUT, _NUM_ROPE, _NUM_PAGED, _NUM_OPTIONS = 9, 6, 4, 10


def layout_arguments(layout: Layout) -> tuple[Any, ...]:
    """A layout as the schema's arguments."""
    return (
        layout.cu_seqlens_q,
        layout.cu_seqlens_k,
        layout.seqused_q,
        layout.seqused_k,
        layout.kv_start,
        layout.block_table,
        layout.key_padding_mask,
        layout.max_seqlen_q,
        layout.max_seqlen_k,
    )


def rope_arguments(rope: Rope | None) -> tuple[Any, ...]:
    """A resolved rotation as the schema's arguments; ``rope_dim`` 0 is none."""
    if rope is None:
        return None, None, None, None, False, 0
    return rope.cos, rope.sin, rope.positions, rope.positions_k, rope.interleaved, rope.rotary_dim


def option_arguments(options: Options, impl: str) -> tuple[Any, ...]:
    """Options as the schema's arguments."""
    return (
        options.scale,
        options.window_left,
        options.window_right,
        options.top_left,
        options.softcap,
        options.block_k,
        options.split_k,
        options.out_dtype,
        options.return_max_logits,
        impl,
    )


def _layout(arguments: tuple[Any, ...]) -> Layout:
    cu_q, cu_k, used_q, used_k, kv_start, table, mask, max_q, max_k = arguments
    return Layout(max_q, max_k, cu_q, cu_k, used_q, used_k, kv_start, table, mask)


def _rope(arguments: tuple[Any, ...]) -> Rope | None:
    cos, sin, positions, positions_k, interleaved, rotary_dim = arguments
    return Rope(cos, sin, positions, interleaved, rotary_dim, positions_k) if rotary_dim else None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rest: tuple[Any, ...], out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    layout, rest = _layout(rest[:_NUM_LAYOUT]), rest[_NUM_LAYOUT:]
    rope, rest = _rope(rest[:_NUM_ROPE]), rest[_NUM_ROPE:]
    k_scale, v_scale, work, slots, *options, impl = rest
    plan = None if work is None else PagedPlan(work, slots)
    result: tuple[Tensor, Tensor, Tensor] = implementation(impl, "forward").attention_forward(
        q, k, v, layout, Options(*options), sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out, plan=plan, rope=rope
    )  # fmt: skip
    return result


@torch.library.impl("rl_attn::attention_forward", "default")
def _attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(q, k, v, sinks, rest, None)


@torch.library.impl("rl_attn::attention_forward_out", "default")
def _attention_forward_out(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    _, lse, max_logits = _forward(q, k, v, sinks, rest[:-1], rest[-1])
    return lse, max_logits


@torch.library.impl("rl_attn::attention_backward", "default")
def _attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layout, rest = _layout(rest[:_NUM_LAYOUT]), rest[_NUM_LAYOUT:]
    rope, (*options, impl) = _rope(rest[:_NUM_ROPE]), rest[_NUM_ROPE:]
    dq, dk, dv, dsinks = implementation(impl, "backward").attention_backward(
        dout, dlse, q, k, v, out, lse, layout, Options(*options), sinks=sinks, rope=rope
    )
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


def _row_statistics(q: Tensor, return_max_logits: bool) -> tuple[Tensor, Tensor]:
    """Fake ``lse`` and ``max_logits``."""
    heads = q.shape[-2]
    shape = (heads, q.shape[0]) if q.dim() == 3 else (q.shape[0], heads, q.shape[1])
    lse = q.new_empty(shape, dtype=torch.float32)
    return lse, q.new_empty(heads if return_max_logits else 0, dtype=torch.float32)


@torch.library.register_fake("rl_attn::attention_forward")
def _attention_forward_fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, out_dtype, return_max_logits, _ = rest
    return q.new_empty(*q.shape[:-1], v.shape[-1], dtype=out_dtype), *_row_statistics(q, return_max_logits)


@torch.library.register_fake("rl_attn::attention_forward_out")
def _attention_forward_out_fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    return _row_statistics(q, rest[-3])


@torch.library.register_fake("rl_attn::attention_backward")
def _attention_backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sinks, *rest = inputs
    layout, rope = rest[:_NUM_LAYOUT], rest[_NUM_LAYOUT : _NUM_LAYOUT + _NUM_ROPE]
    out, lse, max_logits = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(max_logits)
    ctx.save_for_backward(q, k, v, out, lse, sinks, *layout[:-2], *rope[:-2])
    ctx.bounds, ctx.turning, ctx.options = layout[-2:], rope[-2:], rest[-_NUM_OPTIONS:]


def _attention_gradient(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, sinks, *tensors = ctx.saved_tensors
    layout, rope = tensors[: _NUM_LAYOUT - 2], tensors[_NUM_LAYOUT - 2 :]
    if layout[5] is not None:
        raise NotImplementedError("paged attention is forward only: train with flash_attention_varlen")
    nothing = (None,) * (_NUM_LAYOUT + _NUM_ROPE + _NUM_PAGED + _NUM_OPTIONS)
    if dout is None and dlse is None:
        return (None, None, None, None, *nothing)
    dq, dk, dv, dsinks = torch.ops.rl_attn.attention_backward(
        torch.zeros_like(out) if dout is None else dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        sinks,
        *layout,
        *ctx.bounds,
        *rope,
        *ctx.turning,
        *ctx.options,
    )
    return (dq, dk, dv, None if sinks is None else dsinks, *nothing)


torch.library.register_autograd("rl_attn::attention_forward", _attention_gradient, setup_context=_save)


@torch.library.impl("rl_attn::merge_attention", "default")
def _merge_attention(outs: Tensor, lses: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = implementation(impl, "merge").merge_attention(outs, lses)
    return result


@torch.library.register_fake("rl_attn::merge_attention")
def _merge_attention_fake(outs: Tensor, lses: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def _merge_save(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: tuple[Tensor, Tensor]) -> None:
    outs, lses, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(outs, lses, *output)


def _merge_gradient(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None]:
    """With w_p = exp(lse_p - lse): dout_p = w_p dout and dlse_p = w_p (dout . (out_p - out) + dlse)."""
    outs, lses, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return None, None, None
    grad = torch.zeros_like(out, dtype=torch.float32) if dout is None else dout.float()
    lses, lse = lses.transpose(-1, -2), lse.transpose(-1, -2)
    dead = ~torch.isfinite(lses) | ~torch.isfinite(lse)
    weight = torch.where(dead, 0.0, torch.exp(torch.where(dead, 0.0, lses - lse)))
    inner = (grad * (outs.float() - out.float())).sum(-1)
    if dlse is not None:
        inner = inner + dlse.transpose(-1, -2)
    douts = torch.where(dead[..., None], 0.0, weight[..., None] * grad)
    dlses = torch.where(dead, 0.0, weight * inner)
    return douts.to(outs.dtype), dlses.transpose(-1, -2), None


torch.library.register_autograd("rl_attn::merge_attention", _merge_gradient, setup_context=_merge_save)


@torch.library.impl("rl_attn::write_kv_cache", "default")
def _write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    impl: str,
) -> None:
    implementation(impl, "kv_cache").write_kv_cache(
        k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale
    )


@torch.library.register_fake("rl_attn::write_kv_cache")
def _write_kv_cache_fake(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    impl: str,
) -> None:
    return None


@torch.library.impl("rl_attn::apply_rope", "default")
def _apply_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    rotary_dim: int,
    inverse: bool,
    impl: str,
) -> Tensor:
    result: Tensor = implementation(impl, "rope").apply_rope(
        x, cos, sin, positions, interleaved=interleaved, rotary_dim=rotary_dim, inverse=inverse
    )
    return result


@torch.library.register_fake("rl_attn::apply_rope")
def _apply_rope_fake(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    rotary_dim: int,
    inverse: bool,
    impl: str,
) -> Tensor:
    return x.new_empty(x.shape)


def _rope_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, positions, *rest = inputs
    ctx.save_for_backward(cos, sin, positions)
    ctx.rest = rest


def _rope_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin, positions = ctx.saved_tensors
    interleaved, rotary_dim, inverse, impl = ctx.rest
    back = torch.ops.rl_attn.apply_rope(grad, cos, sin, positions, interleaved, rotary_dim, not inverse, impl)
    return (back, *(None,) * 7)


torch.library.register_autograd("rl_attn::apply_rope", _rope_gradient, setup_context=_rope_save)

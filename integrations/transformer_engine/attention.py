"""The module: TransformerEngine's arguments in, the plugin's attention out."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_attn_plugin.ops.attention import flash_attention_varlen
from rl_attn_plugin.types import AttentionOutput
from rl_attn_plugin.validation import Reasons

_FORMATS = ("sbhd", "bshd", "thd")
_TOP_LEFT = ("causal", "padding_causal")
_BOTTOM_RIGHT = ("causal_bottom_right", "padding_causal_bottom_right")
_MASKS = ("no_mask", "padding", *_TOP_LEFT, *_BOTTOM_RIGHT)
_SOFTMAX = ("vanilla", "off-by-one", "learnable")
# Of the constructor: nothing here depends on them.
_UNUSED = {
    "sequence_parallel", "get_rng_state_tracker", "tp_group", "layer_number", "attention_type", "cp_comm_type", "name",
}  # fmt: skip


class DotProductAttention(nn.Module):
    """Attention with TransformerEngine's names, and ``return_lse``, which it lacks.

    ``causal`` and ``padding_causal`` are aligned **top-left**, their ``bottom_right`` forms bottom-right, and windows with
    them; windows of the other masks go bottom-right unless ``bottom_right_diagonal`` is False. Boolean masks mean masked
    **out**.

    Args:
        num_attention_heads: over all tensor-parallel ranks.
        kv_channels: head dim, or (of q and k, of v).
        num_gqa_groups: key/value heads, default as many as query heads.
        attention_dropout: a call in training refuses any but 0; evaluation drops nothing.
        qkv_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        attn_mask_type: ``"no_mask"``, ``"padding"``, ``"causal"``, ``"padding_causal"``, ``"causal_bottom_right"`` or
            ``"padding_causal_bottom_right"``; a comma may stand for an underscore.
        window_size: inclusive (left, right); -1 is unlimited.
        bottom_right_diagonal: alignment of the windows of ``"no_mask"`` and ``"padding"``.
        tp_size: tensor-parallel ranks.
        softmax_scale: default ``kv_channels ** -0.5``.
        softmax_type: ``"vanilla"``, ``"off-by-one"`` (one more logit, of 0) or ``"learnable"`` (of ``softmax_offset``).
        return_max_logit: return ``(out, max_logit [h])``.
        return_lse: return the LSE as well, last: ``[b, h, s]``, or ``[h, t]`` with thd.
        options: what TransformerEngine knows besides; what cannot be honoured is refused by name.

    Raises:
        ValueError: with every reason.
    """

    softmax_offset: Tensor | None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        bottom_right_diagonal: bool | None = None,
        tp_size: int = 1,
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        return_lse: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        why = Reasons("DotProductAttention")
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        mask = _mask(why, attn_mask_type)
        _window(why, mask, window_size)
        why.need(qkv_format in _FORMATS, "qkv_format must be one of {}, got {!r}", list(_FORMATS), qkv_format)
        why.need(
            softmax_type in _SOFTMAX, "softmax_type must be one of {}, got {!r}", list(_SOFTMAX), softmax_type
        )
        why.need(
            tp_size >= 1 and num_attention_heads % tp_size == 0 and groups % tp_size == 0,
            "num_attention_heads and num_gqa_groups must be multiples of tp_size, got {}, {} and {}",
            num_attention_heads,
            groups,
            tp_size,
        )
        for name in ("cp_group", "cp_global_ranks", "cp_stream"):
            given = options.pop(name, None)
            why.need(given is None, "{} must be None: there is no context parallelism, got {}", name, given)
        why.need(options.keys() <= _UNUSED, "there are no arguments {}", sorted(options.keys() - _UNUSED))
        why.done()
        self.heads, self.groups = num_attention_heads // tp_size, groups // tp_size
        self.channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else tuple(kv_channels)
        self.attention_dropout = attention_dropout
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        self.softmax_scale = self.channels[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.softmax_type = softmax_type
        self.return_max_logit, self.return_lse = return_max_logit, return_lse
        self.name = options.get("name")  # TransformerEngine's MultiheadAttention reads it
        # TransformerEngine makes its modules on the GPU.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        offset = torch.zeros(self.heads, device=device)
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(offset)
        else:
            self.register_buffer(
                "softmax_offset", offset if softmax_type == "off-by-one" else None, persistent=False
            )

    def set_context_parallel_group(self, cp_group: Any, *_: Any, **__: Any) -> None:
        """Called by TransformerEngine's layers; refuses any group.

        Raises:
            ValueError: a group.
        """
        if cp_group is not None:
            raise ValueError(
                f"DotProductAttention: cp_group must be None: there is no context parallelism, got {cp_group}"
            )

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        *,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        num_splits: int | None = 1,
        **options: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """Attention.

        Args:
            query_layer: ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``.
            key_layer: as the queries, with groups.
            value_layer: as the keys, with its own head dim.
            attention_mask: padding: bool ``[b, 1, 1, s]``, True = masked out, on the left or right of one run of tokens a
                sequence; two of them for queries and keys that differ.
            qkv_format: of this call.
            cu_seqlens_q: int32 ``[b + 1]``, lengths of the sequences; with thd and no padded offsets, where they lie too.
            cu_seqlens_kv: the same for keys.
            cu_seqlens_q_padded: int32 ``[b + 1]``, where the sequences lie (thd).
            cu_seqlens_kv_padded: the same for keys.
            max_seqlen_q: host bound, may be larger than the truth.
            max_seqlen_kv: the same for keys.
            attn_mask_type: of this call.
            window_size: of this call.
            bottom_right_diagonal: of this call.
            checkpoint_core_attention: compute the attention again in the backward.
            core_attention_bias_type: must be ``"no_bias"``.
            core_attention_bias: must be None.
            alibi_slopes: must be None.
            fast_zero_fill: unused.
            inference_params: must be None.
            pad_between_seqs: unused, the padded offsets say it.
            num_splits: unused, the schedule decides.
            options: refused by name, but for None and False.

        Returns:
            ``[s, b, h * dv]``, ``[b, s, h * dv]`` or ``[t, h * dv]``; ``max_logit`` and ``lse`` follow where asked for.

        Raises:
            ValueError: with every reason.
        """
        del fast_zero_fill, pad_between_seqs, num_splits
        why = Reasons("DotProductAttention")
        why.need(
            not (self.training and self.attention_dropout),
            "attention_dropout must be 0 in training, got {}",
            self.attention_dropout,
        )
        why.need(
            core_attention_bias_type == "no_bias" and core_attention_bias is None,
            "core_attention_bias_type must be 'no_bias' and core_attention_bias None, got {!r} and {}",
            core_attention_bias_type,
            None if core_attention_bias is None else "a tensor",
        )
        refused = {"alibi_slopes": alibi_slopes, "inference_params": inference_params, **options}
        refused.pop("qkv_interleave_dim", None)
        for name, value in refused.items():
            why.need(value is None or value is False, "{} cannot be honoured: leave it out", name)
        why.need(not _fp8_attention(), "fp8 attention cannot be honoured: set fp8_dpa=False in the recipe")
        layout = qkv_format or self.qkv_format
        why.need(layout in _FORMATS, "qkv_format must be one of {}, got {!r}", list(_FORMATS), layout)
        self._check_shapes(why, layout, query_layer, key_layer, value_layer)
        mask = _mask(why, self.attn_mask_type if attn_mask_type is None else attn_mask_type)
        window = _window(why, mask, self.window_size if window_size is None else window_size)
        if layout == "thd":
            why.need("padding" in mask, "attn_mask_type must be a padding one with thd, got {!r}", mask)
            for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
                why.need(cu is not None, "{} must be given with thd, got None", name)
        why.done()

        right = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        top_left = mask in _TOP_LEFT or (right is False and mask not in _BOTTOM_RIGHT)
        arguments: dict[str, Any] = {
            "causal": "causal" in mask, "scale": self.softmax_scale, "window": window,
            "causal_alignment": "top_left" if top_left else "bottom_right", "return_max_logits": self.return_max_logit,
        }  # fmt: skip
        masks = attention_mask if isinstance(attention_mask, tuple) else (attention_mask, attention_mask)
        if layout == "thd":
            q, k, v = query_layer, key_layer, value_layer
            places = _packed("q", q, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q)
            places |= _packed("k", k, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv)
        else:
            dense = [
                x.transpose(0, 1) if layout == "sbhd" else x for x in (query_layer, key_layer, value_layer)
            ]
            places = _dense("q", dense[0], "padding" in mask, cu_seqlens_q, masks[0])
            places |= _dense("k", dense[1], "padding" in mask, cu_seqlens_kv, masks[1])
            q, k, v = (x.flatten(0, 1) for x in dense)

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> AttentionOutput:
            return flash_attention_varlen(q, k, v, **places, **arguments, sinks=sinks)

        if checkpoint_core_attention:
            found = checkpoint(attend, q, k, v, self.softmax_offset, use_reentrant=False)
        else:
            found = attend(q, k, v, self.softmax_offset)
        return self._result(found, query_layer, layout)

    def _check_shapes(self, why: Reasons, layout: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        rank = 3 if layout == "thd" else 4
        wanted = (
            (self.heads, self.channels[0]),
            (self.groups, self.channels[0]),
            (self.groups, self.channels[1]),
        )
        for name, x, tail in zip(("query_layer", "key_layer", "value_layer"), (q, k, v), wanted, strict=True):
            why.need(
                x.dim() == rank and tuple(x.shape[-2:]) == tail,
                "{} must have {} dims with {} and end in {}, got {}",
                name,
                rank,
                layout,
                list(tail),
                list(x.shape),
            )

    def _result(self, found: AttentionOutput, query: Tensor, layout: str) -> Tensor | tuple[Tensor, ...]:
        out, lse = found.out.flatten(1), found.lse
        if layout != "thd":
            batch = query.shape[0 if layout == "bshd" else 1]
            out = out.view(batch, -1, out.shape[-1])
            lse = lse.view(lse.shape[0], batch, -1).transpose(0, 1)
            if layout == "sbhd":
                out = out.transpose(0, 1)
        more = (found.max_logits,) if found.max_logits is not None else ()
        if self.return_lse:
            more = (*more, lse)
        return (out, *more) if more else out

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # TransformerEngine's saves its fp8 state, empty or not; there is none here.
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _mask(why: Reasons, given: str) -> str:
    """The mask's one name."""
    name = given.replace(",", "_")
    name = "padding_causal" if name == "causal_padding" else name
    why.need(name in _MASKS, "attn_mask_type must be one of {}, got {!r}", list(_MASKS), given)
    return name


def _window(why: Reasons, mask: str, window: tuple[int, int] | None) -> tuple[int, int]:
    """What TransformerEngine makes of a window: causal masks clamp it, and (-1, 0) and (-1, -1) are no windows."""
    if window is None or tuple(window) in ((-1, -1), (-1, 0)):
        return (-1, -1)
    left, right = window
    why.need(
        left >= 0 and (right >= 0 or "causal" in mask),
        "window_size must be (-1, -1), (-1, 0) or not negative with {!r}, got {}",
        mask,
        window,
    )
    return (left, 0 if "causal" in mask else right)


def _packed(
    side: str, x: Tensor, cu: Tensor | None, padded: Tensor | None, longest: int | None
) -> dict[str, Any]:
    """Where the sequences of a packed tensor lie and how long they are."""
    assert cu is not None
    # A bound on the device is not fetched: the tokens in all bound it too.
    bound = longest if isinstance(longest, int) else x.shape[0]
    places: dict[str, Any] = {
        f"max_seqlen_{side}": bound,
        f"cu_seqlens_{side}": (cu if padded is None else padded).int(),
    }
    if padded is not None:
        places[f"seqused_{side}"] = cu.int().diff()
    return places


def _dense(side: str, x: Tensor, padded: bool, cu: Tensor | None, mask: Tensor | None) -> dict[str, Any]:
    """The same of ``[b, s, h, d]``, by lengths or by a mask where there is padding."""
    batch, length = x.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * length
    places: dict[str, Any] = {f"max_seqlen_{side}": length, f"cu_seqlens_{side}": starts}
    if not padded:
        return places
    if cu is not None:
        return places | {f"seqused_{side}": cu.int().diff()}
    if mask is None:
        raise ValueError(
            "DotProductAttention: padding must be told by cu_seqlens_q and cu_seqlens_kv or by attention_mask, got neither"
        )
    if list(mask.shape) != [batch, 1, 1, length] or mask.dtype != torch.bool:
        raise ValueError(
            f"DotProductAttention: attention_mask must be bool {[batch, 1, 1, length]}, True = masked out, "
            f"got {mask.dtype} {list(mask.shape)}: give two for queries and keys that differ in length"
        )
    kept = ~mask[:, 0, 0]
    index = torch.arange(length, device=x.device)
    first, count = kept.int().argmax(1), kept.sum(1)
    one_run = kept == ((index >= first[:, None]) & (index < (first + count)[:, None]))
    torch._assert_async(one_run.all(), "attention_mask must keep one run of tokens a sequence")
    starts = torch.cat((starts[:-1] + first, starts[-1:])).int()
    return places | {f"cu_seqlens_{side}": starts, f"seqused_{side}": count.int()}


def _fp8_attention() -> bool:
    """Whether TransformerEngine's own context asks for attention in fp8; it can only where it was imported."""
    modules = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")
    module = next((sys.modules[name] for name in modules if name in sys.modules), None)
    state: Any = getattr(module, "FP8GlobalStateManager", None)
    return state is not None and state.is_fp8_enabled() and bool(state.get_fp8_recipe().fp8_dpa)

"""The module: TransformerEngine's arguments in, the plugin's attention out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_attn_plugin.ops.attention import flash_attention_varlen
from rl_attn_plugin.types import AttentionOutput
from rl_attn_plugin.validation import Reasons

_FORMATS = ("sbhd", "bshd", "thd")
# Spellings that mean the same.
_MASKS = {
    "no_mask": "no_mask",
    "padding": "padding",
    "causal": "causal",
    "padding_causal": "padding_causal",
    "padding,causal": "padding_causal",
    "causal,padding": "padding_causal",
    "causal_bottom_right": "causal_bottom_right",
    "padding_causal_bottom_right": "padding_causal_bottom_right",
}
_SOFTMAX = ("vanilla", "off-by-one", "learnable")


class DotProductAttention(nn.Module):
    """Attention with TransformerEngine's names, and ``return_lse``, which it lacks.

    ``causal`` and ``padding_causal`` are aligned **top-left**, their ``bottom_right`` forms bottom-right; windows go with
    the same diagonal, unless ``bottom_right_diagonal`` says otherwise. Boolean masks mean masked **out**.

    Args:
        num_attention_heads: over all tensor-parallel ranks.
        kv_channels: head dim, or (of q and k, of v).
        num_gqa_groups: key/value heads, default as many as query heads.
        attention_dropout: must be 0.
        qkv_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        attn_mask_type: see the module of the same name in TransformerEngine; ``"arbitrary"`` is refused.
        window_size: inclusive (left, right); -1 is unlimited.
        bottom_right_diagonal: alignment of windows and causality; default by the mask's type.
        tp_size: tensor-parallel ranks.
        softmax_scale: default ``kv_channels ** -0.5``.
        softmax_type: ``"vanilla"``, ``"off-by-one"`` (one more logit, of 0) or ``"learnable"`` (of ``softmax_offset``).
        return_max_logit: return ``(out, max_logit [h])``.
        return_lse: return the LSE as well, last: ``[b, h, s]``, or ``[h, t]`` with thd.
        options: what TransformerEngine knows besides; what cannot be honoured is refused by name.

    Raises:
        ValueError: with every reason.
    """

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
        why.need(attention_dropout == 0, "attention_dropout must be 0, got {}", attention_dropout)
        why.need(qkv_format in _FORMATS, "qkv_format must be one of {}, got {!r}", list(_FORMATS), qkv_format)
        _need_mask(why, attn_mask_type)
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
            why.need(
                options.pop(name, None) is None, "{} must be None: there is no context parallelism", name
            )
        known = {
            "sequence_parallel",
            "get_rng_state_tracker",
            "tp_group",
            "layer_number",
            "attention_type",
            "cp_comm_type",
            "name",
        }
        unknown = sorted(options.keys() - known)
        why.need(not unknown, "there are no arguments {}", unknown)
        why.done()
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        dim, self.v_channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.softmax_scale = dim**-0.5 if softmax_scale is None else softmax_scale
        self.softmax_type = softmax_type
        self.return_max_logit, self.return_lse = return_max_logit, return_lse
        self.softmax_offset: Tensor | None
        heads = num_attention_heads // tp_size
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(heads))
        else:
            self.register_buffer(
                "softmax_offset",
                torch.zeros(heads) if softmax_type == "off-by-one" else None,
                persistent=False,
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
            attention_mask: padding: bool ``[b, 1, 1, s]``, True = masked out, on the right of each sequence; two of them for
                queries and keys that differ.
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
        layout = qkv_format or self.qkv_format
        given = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        why = Reasons("DotProductAttention")
        why.need(layout in _FORMATS, "qkv_format must be one of {}, got {!r}", list(_FORMATS), layout)
        _need_mask(why, given)
        why.need(
            core_attention_bias_type == "no_bias" and core_attention_bias is None,
            "core_attention_bias_type must be 'no_bias', got {!r}",
            core_attention_bias_type,
        )
        refused = {"alibi_slopes": alibi_slopes, "inference_params": inference_params, **options}
        for name, value in refused.items():
            if name != "qkv_interleave_dim":
                why.need(value is None or value is False, "{} cannot be honoured: leave it out", name)
        rank = 3 if layout == "thd" else 4
        for name, x in (("query_layer", query_layer), ("key_layer", key_layer), ("value_layer", value_layer)):
            why.need(
                x.dim() == rank, "{} must have {} dims with {}, got {}", name, rank, layout, list(x.shape)
            )
        if layout == "thd":
            why.need("padding" in given, "attn_mask_type must be a padding one with thd, got {!r}", given)
            why.need(
                cu_seqlens_q is not None and cu_seqlens_kv is not None,
                "cu_seqlens_q and cu_seqlens_kv must be given with thd, got {}",
                None,
            )
        why.done()
        mask = _MASKS[given]
        right = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        if right is None:
            right = mask not in ("causal", "padding_causal")
        window = self.window_size if window_size is None else window_size
        arguments: dict[str, Any] = {
            "causal": "causal" in mask, "scale": self.softmax_scale, "window": (-1, -1) if window is None else tuple(window),
            "causal_alignment": "bottom_right" if right else "top_left", "return_max_logits": self.return_max_logit,
        }  # fmt: skip
        q, k, v, placed = _placed(
            query_layer, key_layer, value_layer, layout, "padding" in mask, attention_mask, cu_seqlens_q, cu_seqlens_kv,
            cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv,
        )  # fmt: skip

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> AttentionOutput:
            return flash_attention_varlen(q, k, v, **placed, **arguments, sinks=sinks)

        if checkpoint_core_attention:
            found = checkpoint(attend, q, k, v, self.softmax_offset, use_reentrant=False)
        else:
            found = attend(q, k, v, self.softmax_offset)
        return self._result(found, query_layer, layout)

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


def _need_mask(why: Reasons, kind: str) -> None:
    why.need(kind in _MASKS, "attn_mask_type must be one of {}, got {!r}", list(_MASKS), kind)


def _placed(
    q: Tensor, k: Tensor, v: Tensor, layout: str, padded: bool, mask: Tensor | tuple[Tensor, Tensor] | None,
    cu_q: Tensor | None, cu_k: Tensor | None, padded_q: Tensor | None, padded_k: Tensor | None, max_q: int | None,
    max_k: int | None,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:  # fmt: skip
    """Packed tensors, and where sequences lie in them and how long they are."""
    placed: dict[str, Any] = {}
    if layout == "thd":
        assert cu_q is not None and cu_k is not None
        placed |= {
            "max_seqlen_q": q.shape[0] if max_q is None else max_q,
            "max_seqlen_k": k.shape[0] if max_k is None else max_k,
        }
        for side, cu, at in (("q", cu_q, padded_q), ("k", cu_k, padded_k)):
            placed[f"cu_seqlens_{side}"] = (cu if at is None else at).int()
            if at is not None:
                placed[f"seqused_{side}"] = cu.int().diff()
        return q, k, v, placed
    if layout == "sbhd":
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    masks: tuple[Tensor | None, Tensor | None] = mask if isinstance(mask, tuple) else (mask, mask)
    for side, x, lengths, hidden in (("q", q, cu_q, masks[0]), ("k", k, cu_k, masks[-1])):
        batch, length = x.shape[:2]
        placed[f"cu_seqlens_{side}"] = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * length
        placed[f"max_seqlen_{side}"] = length
        if padded and lengths is not None:
            placed[f"seqused_{side}"] = lengths.int().diff()
        elif padded and hidden is not None:
            placed[f"seqused_{side}"] = (~hidden.reshape(batch, length)).sum(1, dtype=torch.int32)
        elif padded:
            raise ValueError(
                "DotProductAttention: padding must be told by cu_seqlens_q and cu_seqlens_kv or by attention_mask, "
                "got neither"
            )
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), placed

"""The core attention that Megatron's attention layers build and call."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from rl_attn_plugin.ops.attention import flash_attention, flash_attention_varlen
from rl_attn_plugin.types import AttentionOutput
from rl_attn_plugin.validation import Reasons

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_PADDING = (AttnMaskType.padding, AttnMaskType.padding_causal)


class CoreAttention(MegatronModule):
    """Drop-in for ``DotProductAttention`` and ``TEDotProductAttention``: the plugin's attention, sbhd and thd.

    Masks are told by their type, as TransformerEngine does: a mask tensor is read for padding alone. Causal masks are
    aligned bottom-right, which differs from top-left only where queries and keys differ in number. Nothing waits for the
    device: ``max_seqlen`` may be larger than the truth, and sequences may be empty.

    Args:
        config: of the model.
        layer_number: 1-based, over all pipeline stages.
        attn_mask_type: used where a call gives none.
        attention_type: ``"self"`` or ``"cross"``.
        attention_dropout: must come out as 0.
        softmax_scale: default ``k_channels ** -0.5``. ``apply_query_key_layer_scaling`` divides the product by the layer's
            number and multiplies it back in fp32, which needs no doing here.
        cp_comm_type: unused, there is no context parallelism.
        pg_collection: with the tensor-parallel group.
        k_channels: head dim of q and k where it is not ``kv_channels`` (MLA).
        v_channels: head dim of v.
        num_splits: unused, the schedule decides.

    Raises:
        ValueError: dropout, context parallelism or fp8 attention, with every reason.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
    ) -> None:
        super().__init__(config=config)
        del attention_type, cp_comm_type, num_splits
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        why = Reasons("CoreAttention")
        why.need(dropout == 0, "attention_dropout must be 0 (--attention-dropout 0), got {}", dropout)
        why.need(
            config.context_parallel_size == 1,
            "context_parallel_size must be 1 (--context-parallel-size 1), got {}",
            config.context_parallel_size,
        )
        for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
            why.need(not getattr(config, name, False), "{} must be off, got True", name)
        why.done()

        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        heads = config.num_attention_heads // self.tp_group.size()
        dim = config.kv_channels if k_channels is None else k_channels
        self.hidden_size_per_attention_head_v = config.kv_channels if v_channels is None else v_channels
        self.softmax_scale = dim**-0.5 if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: tuple[int, int] = tuple(config.window_size) if windowed else (-1, -1)
        # of queries and keys in QK-clip; Megatron reads and clears it
        self.current_max_attn_logits: Tensor | None = None
        self._wants_max = bool(
            getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False)
        )
        self.softmax_offset: Tensor | None = None
        if config.softmax_type != "vanilla":
            device = (
                "cpu"
                if config.use_cpu_initialization or not torch.cuda.is_available()
                else torch.cuda.current_device()
            )
            offset = torch.zeros(heads, device=device, dtype=config.params_dtype)
            if config.softmax_type == "off-by-one":  # one more logit, of 0
                self.softmax_offset = offset
            else:
                self.softmax_offset = torch.nn.Parameter(offset)
                if config.perform_initialization:
                    config.init_method(self.softmax_offset)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Attention of one layer.

        Args:
            query: ``[sq, b, np, hn]``, or ``[t, np, hn]`` with packed sequences.
            key: ``[sk, b, ng, hn]`` or ``[t, ng, hn]``; groups are not expanded.
            value: as key, with its own head dim.
            attention_mask: bool ``[b, 1, 1, sk]``, True = masked out, read for padding masks alone.
            attn_mask_type: of this call.
            attention_bias: must be None.
            packed_seq_params: offsets of packed sequences; with padded ones, those are where sequences lie and the plain
                ones how long they are.
            num_splits: unused.

        Returns:
            ``[sq, b, np * hn]`` or ``[t, np * hn]``.

        Raises:
            NotImplementedError: a bias, or an arbitrary mask.
        """
        del num_splits
        if attention_bias is not None:
            raise NotImplementedError(
                "CoreAttention adds no attention bias, got one: leave it out or use TransformerEngine"
            )
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        options: dict[str, Any] = {
            "causal": kind in _CAUSAL, "scale": self.softmax_scale, "window": self.window, "sinks": self.softmax_offset,
            "return_max_logits": self._wants_max,
        }  # fmt: skip
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            found = _packed(query, key, value, packed_seq_params, options)
            result = found.out.flatten(1)
        else:
            keep = _kept(attention_mask, kind, key)
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            found = flash_attention(q, k, v, key_padding_mask=keep, **options)
            result = found.out.flatten(2).transpose(0, 1)
        if found.max_logits is not None:
            before = self.current_max_attn_logits
            seen = found.max_logits.detach()
            self.current_max_attn_logits = seen if before is None else torch.maximum(before, seen)
        return result

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The learnable softmax offset, cut over tensor-parallel ranks as Megatron's own is."""
        state = self.state_dict(prefix="", keep_vars=True) if self.config.softmax_type == "learnable" else {}
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups
        )
        return sharded


def _packed(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, options: dict[str, Any]
) -> AttentionOutput:
    cu_q, cu_k = packed.cu_seqlens_q.int(), packed.cu_seqlens_kv.int()
    padded_q, padded_k = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
    used: dict[str, Any] = {}
    if padded_q is not None:
        used["seqused_q"], cu_q = cu_q.diff(), padded_q.int()
    if padded_k is not None:
        used["seqused_k"], cu_k = cu_k.diff(), padded_k.int()
    longest_q = q.shape[0] if packed.max_seqlen_q is None else int(packed.max_seqlen_q)
    longest_k = k.shape[0] if packed.max_seqlen_kv is None else int(packed.max_seqlen_kv)
    return flash_attention_varlen(q, k, v, cu_q, cu_k, longest_q, longest_k, **used, **options)


def _kept(mask: Tensor | None, kind: AttnMaskType, key: Tensor) -> Tensor | None:
    """Keys to keep, ``[b, sk]``; Megatron's masks are True where something is masked out."""
    if kind is AttnMaskType.arbitrary:
        raise NotImplementedError(
            "CoreAttention takes no arbitrary mask: use padding, causal or packed sequences, or TransformerEngine"
        )
    if kind not in _PADDING or mask is None:
        return None
    wanted = (key.shape[1], 1, 1, key.shape[0])
    if tuple(mask.shape) != wanted or mask.dtype != torch.bool:
        raise NotImplementedError(
            f"a padding mask must be bool {list(wanted)}, True = masked out, got {mask.dtype} {list(mask.shape)}"
        )
    return ~mask[:, 0, 0]

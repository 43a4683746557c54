"""The core attention that Megatron's attention layers build and call."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

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
        attention_dropout: default the config's. A call in training refuses any but 0; evaluation drops nothing.
        softmax_scale: default ``k_channels ** -0.5``. ``apply_query_key_layer_scaling`` divides the product by the layer's
            number and multiplies it back in fp32, which needs no doing here.
        cp_comm_type: unused, there is no context parallelism.
        pg_collection: with the tensor-parallel group.
        k_channels: head dim of q and k where it is not ``kv_channels`` (MLA).
        v_channels: head dim of v.
        num_splits: unused, the schedule decides.

    Raises:
        ValueError: context parallelism, fp8 attention or an unknown ``softmax_type``, with every reason.
    """

    softmax_offset: Tensor | None

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
        why = Reasons("CoreAttention")
        why.need(
            config.context_parallel_size == 1,
            "context_parallel_size must be 1 (--context-parallel-size 1), got {}",
            config.context_parallel_size,
        )
        for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
            why.need(not getattr(config, name, False), "{} must be off, got True", name)
        why.need(
            config.softmax_type in ("vanilla", "off-by-one", "learnable"),
            "softmax_type must be 'vanilla', 'off-by-one' or 'learnable', got {!r}",
            config.softmax_type,
        )
        why.done()

        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        self.layer_number, self.attn_mask_type = max(1, layer_number), attn_mask_type
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        dim = config.kv_channels if k_channels is None else k_channels
        # MLA writes and reads this one.
        self.hidden_size_per_attention_head_v = config.kv_channels if v_channels is None else v_channels
        self.softmax_scale = dim**-0.5 if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: tuple[int, int] = tuple(config.window_size) if windowed else (-1, -1)
        # Of queries and keys since QK-clip last cleared it.
        self.current_max_attn_logits: Tensor | None = None
        self._wants_max = bool(
            getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False)
        )
        self._make_softmax_offset(config)

    def _make_softmax_offset(self, config: TransformerConfig) -> None:
        """``[np]``: None, a zero a head, or a parameter."""
        if config.softmax_type == "vanilla":
            self.register_buffer("softmax_offset", None)
            return
        on_cpu = config.use_cpu_initialization or not torch.cuda.is_available()
        offset = torch.zeros(
            config.num_attention_heads // self.tp_group.size(),
            device="cpu" if on_cpu else torch.cuda.current_device(),
            dtype=config.params_dtype,
        )
        if config.softmax_type == "off-by-one":
            # A buffer follows the module to its device; it is a constant, so no checkpoint holds it.
            self.register_buffer("softmax_offset", offset, persistent=False)
            return
        parameter = nn.Parameter(offset)
        # Without these, gradient norms count the first tensor-parallel rank's heads alone.
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.softmax_offset = parameter
        if config.perform_initialization:
            config.init_method(parameter)

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
            ValueError: dropout in training.
            NotImplementedError: a bias, an arbitrary mask, context parallelism of this call's own, or a packed format
                other than thd.
        """
        del num_splits
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        self._refuse(kind, attention_bias, packed_seq_params)
        options: dict[str, Any] = {
            "causal": kind in _CAUSAL, "scale": self.softmax_scale, "window": self.window, "sinks": self.softmax_offset,
            "return_max_logits": self._wants_max,
        }  # fmt: skip
        if packed_seq_params is not None:
            found = _packed(query, key, value, packed_seq_params, options)
            result = found.out.flatten(1)
        else:
            keep = _kept(attention_mask, key) if kind in _PADDING else None
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            found = flash_attention(q, k, v, key_padding_mask=keep, **options)
            result = found.out.flatten(2).transpose(0, 1)
        if found.max_logits is not None:
            before = self.current_max_attn_logits
            seen = found.max_logits.detach()
            self.current_max_attn_logits = seen if before is None else torch.maximum(before, seen)
        return result

    def _refuse(self, kind: AttnMaskType, bias: Tensor | None, packed: PackedSeqParams | None) -> None:
        if self.training and self.attention_dropout:
            raise ValueError(
                "CoreAttention: attention_dropout must be 0 in training (--attention-dropout 0), "
                f"got {self.attention_dropout}"
            )
        if bias is not None:
            raise NotImplementedError(
                "CoreAttention adds no attention bias, got one: leave it out or use TransformerEngine"
            )
        if kind is AttnMaskType.arbitrary:
            raise NotImplementedError(
                "CoreAttention takes no arbitrary mask: use padding, causal or packed sequences, or TransformerEngine"
            )
        if packed is None:
            return
        if packed.qkv_format != "thd":
            raise NotImplementedError(
                f"packed_seq_params.qkv_format must be 'thd', got {packed.qkv_format!r}: pack the sequences or pass none"
            )
        ranks = packed.local_cp_size or (1 if packed.cp_group is None else packed.cp_group.size())
        if ranks > 1:
            raise NotImplementedError(
                f"packed_seq_params must be of one context-parallel rank, got {ranks}: turn dynamic context parallelism off"
            )

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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # TransformerEngine's attention saves its fp8 state, empty or not; there is none here.
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


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
    longest_q, longest_k = _bound(packed.max_seqlen_q, q), _bound(packed.max_seqlen_kv, k)
    return flash_attention_varlen(q, k, v, cu_q, cu_k, longest_q, longest_k, **used, **options)


def _bound(longest: int | Tensor | None, x: Tensor) -> int:
    """A bound known to the host; one that lies on the device is not fetched, the tokens in all bound it too."""
    return longest if isinstance(longest, int) else x.shape[0]


def _kept(mask: Any, key: Tensor) -> Tensor | None:
    """Keys to keep, ``[b, sk]``; Megatron's masks are True where something is masked out."""
    if mask is None:
        return None
    wanted = [key.shape[1], 1, 1, key.shape[0]]
    if not isinstance(mask, Tensor) or list(mask.shape) != wanted or mask.dtype != torch.bool:
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise NotImplementedError(f"a padding mask must be bool {wanted}, True = masked out, got {got}")
    return ~mask[:, 0, 0]

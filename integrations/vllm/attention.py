"""One layer's attention: new keys go into vLLM's cache, then every query of the step attends over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from rl_attn_plugin.integrations.vllm.metadata import RLAttentionMetadata
from rl_attn_plugin.ops.attention import flash_attention_paged
from rl_attn_plugin.ops.cache import write_kv_cache

E4M3 = ("fp8", "fp8_e4m3")
"""vLLM's names of the one 8-bit cache that there is here."""


class RLAttentionImpl(AttentionImpl[RLAttentionMetadata]):
    """Causal decoder attention, one call for whatever a step mixes."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        """Take what vLLM gives a layer.

        Args:
            num_heads: Hq of this rank.
            head_size: D.
            scale: multiplies the scores.
            num_kv_heads: Hkv of this rank.
            alibi_slopes: must be None.
            sliding_window: W keys, the query's own included.
            kv_cache_dtype: ``"auto"``, the model's own, or e4m3.
            logits_soft_cap: of the scores; None or 0 is off.
            attn_type: must be a decoder's.
            kv_sharing_target_layer_name: the layer whose cache this one reads; vLLM does the sharing.
            sinks: ``[Hq]``.
            others: what single models add; must be None or False.

        Raises:
            NotImplementedError: with everything that this backend does not do.
        """
        refused = [f"{name}={value!r}" for name, value in others.items() if value not in (None, False)]
        if alibi_slopes is not None:
            refused.append("alibi_slopes")
        if attn_type != AttentionType.DECODER:
            refused.append(f"attn_type={attn_type!r}")
        if kv_cache_dtype.startswith("fp8") and kv_cache_dtype not in E4M3:
            refused.append(f"kv_cache_dtype={kv_cache_dtype!r}")
        if refused:
            raise NotImplementedError(
                f"attention_backend='CUSTOM' (rl_attn_plugin) does not have {', '.join(refused)}: "
                "use another attention_backend for this model"
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.window = (-1 if sliding_window is None else sliding_window - 1, 0)
        self.softcap = float(logits_soft_cap or 0.0)
        self.sinks = sinks
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write a step's new keys and values.

        Args:
            layer: holds the scales of an e4m3 cache.
            key: ``[T, Hkv, D]``, rotated; may be longer than ``slot_mapping``.
            value: ``[T, Hkv, Dv]``.
            kv_cache: ``[num_blocks, Hkv, block_size, D + Dv]``.
            slot_mapping: int64 ``[T]``, -1 for padding.
        """
        count = slot_mapping.shape[0]
        k_cache, v_cache = self._caches(kv_cache)
        k_scale, v_scale = self._scales(layer)
        write_kv_cache(
            key[:count], value[:count], k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: RLAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend to the cache, which `do_kv_cache_update` has filled.

        Args:
            layer: holds the scales of an e4m3 cache.
            query: ``[T, Hq, D]``; rows past the requests' are padding.
            key: in the cache already.
            value: in the cache already.
            kv_cache: ``[num_blocks, Hkv, block_size, D + Dv]``.
            attn_metadata: None while vLLM measures memory.
            output: ``[T, Hq, Dv]``, written here; 0 where there is padding.
            output_scale: must be None.
            output_block_scale: must be None.

        Returns:
            ``output``.

        Raises:
            NotImplementedError: when the output is to be quantised.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "attention_backend='CUSTOM' does not quantise its output: switch fuse_attn_quant off"
            )
        if attn_metadata is None:
            return output.zero_()
        k_cache, v_cache = self._caches(kv_cache)
        k_scale, v_scale = self._scales(layer)
        flash_attention_paged(
            query,
            k_cache,
            v_cache,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            attn_metadata.max_query_len,
            attn_metadata.max_seq_len,
            k_scale=k_scale,
            v_scale=v_scale,
            out=output,
            plan=attn_metadata.plan,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            out_dtype=output.dtype,
        )
        return output

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views ``[num_blocks, block_size, Hkv, D]`` and ``[.., Dv]``: vLLM keeps a token's key and value side by side."""
        if self._e4m3:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)  # vLLM's tensor is of bytes
        tokens = kv_cache.transpose(1, 2)
        return tokens[..., : self.head_size], tokens[..., self.head_size :]

    def _scales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        return (layer._k_scale, layer._v_scale) if self._e4m3 else (None, None)

    @property
    def _e4m3(self) -> bool:
        return self.kv_cache_dtype in E4M3

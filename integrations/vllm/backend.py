"""What vLLM asks a backend before it builds a layer: what it supports, and the classes that do the work."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend

from rl_attn_plugin.integrations.vllm.attention import E4M3, RLAttentionImpl
from rl_attn_plugin.integrations.vllm.metadata import RLAttentionMetadataBuilder

_MAX_HEAD_SIZE = 256


class RLAttentionBackend(AttentionBackend):
    """Decoder attention over vLLM's paged cache; any page size, any of its cache layouts.

    What is not answered here keeps vLLM's default, which is no: MLA, sparse attention, encoders, bidirectional image
    tokens, context parallelism, scales per head.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *E4M3]
    forward_includes_kv_cache_update = False  # `RLAttentionImpl.do_kv_cache_update` is called before forward

    @staticmethod
    def get_name() -> str:
        """A name of vLLM's own list of backends, where it is looked up."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RLAttentionImpl]:
        """The class of a layer's attention."""
        return RLAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RLAttentionMetadataBuilder]:
        """The class that describes a step."""
        return RLAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The cache of a layer as later vLLMs lay it out by themselves; 0.28 and before ask the backend."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Up to 256."""
        return 1 <= head_size <= _MAX_HEAD_SIZE

    @classmethod
    def supports_sink(cls) -> bool:
        """One learned logit a head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Per layer; blocks that vLLM has freed behind the window are never used."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A row's bits never depend on what it is batched with, on chunks or on the cache."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """The plan of a step holds for the lengths it was made from."""
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        """A cache of another 16-bit type than the queries would round keys a second time."""
        if kv_cache_dtype in (None, "auto", *E4M3) or kv_cache_dtype == str(dtype).removeprefix("torch."):
            return None
        return f"kv_cache_dtype {kv_cache_dtype} with a model in {dtype} not supported, use auto or fp8_e4m3"

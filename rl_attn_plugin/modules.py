"""The attention as an ``nn.Module``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rl_attn_plugin.ops.attention import flash_attention, flash_attention_paged, flash_attention_varlen
from rl_attn_plugin.types import AttentionOutput, Impl


class FlashAttention(nn.Module):
    """Core attention of one layer: no projections, no dropout, one learnable tensor at most.

    ``forward`` takes what the three functions take and picks by the arguments given: ``block_table`` means
    `flash_attention_paged`, ``cu_seqlens_q`` without it `flash_attention_varlen`, neither `flash_attention`.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        v_head_dim: int | None = None,
        *,
        scale: float | None = None,
        causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: bool = False,
        impl: Impl | str = Impl.AUTO,
    ) -> None:
        """Fix what is the same in every call.

        Args:
            num_heads: Hq.
            head_dim: D.
            num_kv_heads: Hkv, default Hq.
            v_head_dim: Dv, default D.
            scale: default ``head_dim ** -0.5``.
            causal: see `flash_attention`.
            window: see `flash_attention`.
            softcap: see `flash_attention`.
            sinks: add a learnable sink logit a head, starting at 0.
            impl: see `flash_attention`.

        Raises:
            ValueError: when heads do not divide.
        """
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {kv_heads}")
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, kv_heads
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.scale, self.causal, self.window, self.softcap, self.impl = scale, causal, window, softcap, impl
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **arguments: Any) -> AttentionOutput:
        """Attend; see the class for which function gets the arguments.

        Raises:
            ValueError: when a tensor does not have this module's heads, or as the function raises.
        """
        for name, x, expected in (
            ("q", q, (self.num_heads, self.head_dim)),
            ("k", k, (self.num_kv_heads, self.head_dim)),
            ("v", v, (self.num_kv_heads, self.v_head_dim)),
        ):
            if tuple(x.shape[-2:]) != expected:
                raise ValueError(
                    f"{name} must end in {expected}, this module's heads and dim, got {tuple(x.shape)}"
                )
        fixed: dict[str, Any] = {
            "scale": self.scale,
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "impl": self.impl,
        }
        function: Callable[..., AttentionOutput] = flash_attention
        if "block_table" in arguments or len(lengths) == 5:
            function = flash_attention_paged
        elif "cu_seqlens_q" in arguments or lengths:
            function = flash_attention_varlen
        return function(q, k, v, *lengths, **arguments, **fixed)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}/{self.num_kv_heads}, dim={self.head_dim}/{self.v_head_dim}"

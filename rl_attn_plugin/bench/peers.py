"""Attention of other libraries, as far as they are importable; every function takes ``[B, S, H, D]``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.replay.peers import SDPA, Attention, first, flash_attention_3, sdpa


def transformer_engine(heads: int, kv_heads: int, dim: int) -> Attention | None:
    """TransformerEngine's DotProductAttention, or None where it cannot be imported."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    try:
        module = importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as reason:
        print(f"  transformer-engine cannot be imported: {reason}", file=sys.stderr)  # noqa: T201
        return None
    layer = module.DotProductAttention(
        heads, dim, num_gqa_groups=kv_heads, qkv_format="bshd", attn_mask_type="causal"
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = layer(q, k, v)
        return out.view(*q.shape[:3], v.shape[-1])

    return run


def flex(length: int) -> Attention:
    """torch's flex attention, compiled, with a causal block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
    torch._functorch.config.donated_buffer = False  # the benchmark takes several gradients of one forward
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def trainable(length: int) -> dict[str, Attention]:
    """Every peer of a dense causal forward and backward."""
    found: dict[str, Attention] = {name: sdpa(backend) for name, backend in SDPA.items()}
    return found | {"torch-flex": flex(length)}


def dense(length: int, heads: int, kv_heads: int, dim: int) -> dict[str, Attention]:
    """Every importable peer of a dense causal forward."""
    found = trainable(length)
    fa3 = flash_attention_3()
    if fa3 is not None:
        found["flash-attention-3"] = lambda q, k, v: first(fa3.flash_attn_func(q, k, v, causal=True))
    te = transformer_engine(heads, kv_heads, dim)
    if te is not None:
        found["transformer-engine"] = te
    return found


def packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> dict[str, Callable[[], Tensor]]:
    """Every importable peer of a packed causal forward of ``[T, H, D]``."""
    found: dict[str, Callable[[], Tensor]] = {}
    with contextlib.suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn

        known = inspect.signature(varlen_attn).parameters  # causality moved between releases
        options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        found["torch-varlen"] = lambda: first(varlen_attn(q, k, v, cu, cu, longest, longest, **options))
    fa3 = flash_attention_3()
    if fa3 is not None:
        found["flash-attention-3"] = lambda: first(
            fa3.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)
        )
    return found


def exact_tail(q: Tensor, k: Tensor, v: Tensor, rows: int, heads: int) -> Tensor:
    """fp64 causal attention of the last ``rows`` queries of the first ``heads`` heads, ``[rows, heads, Dv]``."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q[-rows:, :heads].double(), k.double(), v.double()
    out = []
    for h in range(heads):
        scores = q[:, h] @ k[:, h // group].T * q.shape[-1] ** -0.5
        hidden = torch.ones(rows, k.shape[0], dtype=torch.bool, device=q.device).triu(k.shape[0] - rows + 1)
        out.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, h // group])
    return torch.stack(out, 1)

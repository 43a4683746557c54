"""Attention of other libraries, as far as they are importable, and how far their decode is from their prefill."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rl_attn_plugin.replay.packing import Packed
from rl_attn_plugin.replay.paths import NotHere, Replay
from rl_attn_plugin.replay.results import AttentionPathResult, PathProvenance
from rl_attn_plugin.types import AttentionOutput

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Scaled = Callable[[Tensor, Tensor, Tensor, "float | None"], Tensor]

SDPA = {"torch-flash": SDPBackend.FLASH_ATTENTION, "torch-cudnn": SDPBackend.CUDNN_ATTENTION}
_ROWS = 32  # decoded positions of a sequence, at most
_FIRST = 16


@dataclass(frozen=True, slots=True)
class Peer:
    """A library that both trainers and rollouts use.

    Attributes:
        name: of it.
        prefill: causal attention of ``[1, S, H, D]``, with a scale.
        decode: attention of one query ``[1, 1, H, D]`` over the keys up to it, with a scale.
        source: the module it comes from.
    """

    name: str
    prefill: Scaled
    decode: Scaled
    source: str


def flash_attention_3() -> ModuleType | None:
    """FlashAttention-3's interface, under whichever name it is installed."""
    return _importable("flash_attn_interface") or _importable("fa3_fwd_interface")


def sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
    """torch SDPA restricted to one backend; causal where queries and keys are equally many."""

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        with sdpa_kernel(backend):
            # top-left is bottom-right for equal lengths, and one query sees every key
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            causal = q.shape[2] > 1
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def first(result: Any) -> Tensor:
    """The output of an interface that returns it alone or in front of others."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def importable_peers() -> list[Peer]:
    """Every library whose decode can be held against its prefill."""
    peers = [Peer(name, sdpa(backend), sdpa(backend), "torch") for name, backend in SDPA.items()]
    fa2, fa3 = _importable("flash_attn"), flash_attention_3()
    if fa2 is not None:
        peers.append(_flash_attention("flash-attention-2", fa2, {}))
    if fa3 is not None:
        for name, splits in (("flash-attention-3", 0), ("flash-attention-3, num_splits=1", 1)):
            peers.append(_flash_attention(name, fa3, {"num_splits": splits}))
    return peers


def _flash_attention(name: str, module: ModuleType, options: dict[str, Any]) -> Peer:
    def prefill(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return first(module.flash_attn_func(q, k, v, softmax_scale=scale, causal=True))

    def decode(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        used = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
        return first(
            module.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=used, softmax_scale=scale, causal=True, **options
            )
        )

    return Peer(name, prefill, decode, module.__name__)


def _importable(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def sampled_rows(length: int) -> list[int]:
    """Positions that are decoded, evenly spread up to the last; without the first few, which some peers refuse."""
    first = min(_FIRST, length - 1)
    return sorted({first + round(i * (length - 1 - first) / (_ROWS - 1)) for i in range(_ROWS)})


def decode_and_prefill(r: Replay, peer: Peer) -> tuple[AttentionPathResult, AttentionPathResult]:
    """A peer's decode of sampled positions, and its own prefill at the same rows.

    Raises:
        NotHere: the inputs need what the peer is not asked for here, or it refuses them.
    """
    p, x = r.packed, r.inputs
    extras = [name for name, given in {
        "a window": x.window != (-1, -1), "softcap": x.softcap, "sinks": x.sinks is not None,
        "attention that is not causal": not x.causal,
        "fewer queries than keys": p.queries != p.keys,
    }.items() if given]  # fmt: skip
    if extras:
        raise NotHere(f"{peer.name} is compared without {', '.join(extras)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells in warnings why each other backend was not used
            prefill, decode, rows = _both(p, peer, x.scale)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as refusal:
        raise NotHere(f"{peer.name} refuses: {str(refusal).strip().splitlines()[0]}") from refusal
    positions = sampled_rows(max(p.keys))

    def result(mode: str, out: Tensor) -> AttentionPathResult:
        how = PathProvenance(
            attention_mode=mode, materialization="dense", requested_backend=peer.name, actual_backend=peer.name,
            actual_backend_source=peer.source, rows=positions, lse_exported=False,
            q_rope_state=r.base.q_rope_state, k_rope_state=r.base.k_rope_state,
        )  # fmt: skip
        found = r.result("", AttentionOutput(out.to(x.out_dtype), out), "dense")
        return replace(found, name=f"{peer.name}:{mode}", lse=None, provenance=how, rows=rows)

    return result("decode", decode), result("prefill", prefill)


def _both(p: Packed, peer: Peer, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Prefill and decode ``[N, Hq, Dv]`` at the sampled rows of every sequence, and those rows."""
    whole, ones, rows = [], [], []
    for queries, keys in p.sequences:
        q, k, v = p.q[queries][None], p.k[keys][None], p.v[keys][None]
        if not q.shape[1]:
            continue
        at = sampled_rows(q.shape[1])
        whole.append(peer.prefill(q, k, v, scale)[0, at])
        ones += [peer.decode(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], scale)[0] for t in at]
        rows += [queries.start + t for t in at]
    return torch.cat(whole), torch.cat(ones), torch.tensor(rows, device=p.device)

"""What computes the attention of a path: the kernels that training and rollout run, or the fp32 reference."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.ops.attention import flash_attention_paged, flash_attention_varlen
from rl_attn_plugin.ops.dispatch import arch, resolve_impl
from rl_attn_plugin.reference import attention_reference
from rl_attn_plugin.replay.inputs import AttentionComparisonInputs
from rl_attn_plugin.types import AttentionOutput, Impl, default_schedule

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Shard:
    """Keys ``[start, start + count)`` of every sequence, and how a mask finds its way in them.

    Attributes:
        start: absolute index of the first key, of each sequence, int32 ``[B]``.
        options: replace the call's own: alignment, causality and window seen from the shard.
    """

    start: Tensor
    options: dict[str, Any]


class Kernels:
    """The plugin's kernels, triton or torch."""

    def __init__(self, inputs: AttentionComparisonInputs, impl: Impl | str) -> None:
        self.impl = resolve_impl(impl, inputs.q.device)
        self.name = self.impl.value
        self.source = f"rl_attn_plugin.{'kernels' if self.impl is Impl.TRITON else 'eager'}"
        schedule = default_schedule(
            inputs.q.shape[-1], inputs.v.shape[-1], inputs.v.dtype, arch(inputs.q.device)
        )
        self.schedule_id: str | None = schedule.id
        self._out_dtype = inputs.out_dtype
        self._options = _options(inputs)

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, queries: int, keys: int,
        *, used_k: Tensor | None = None, shard: Shard | None = None, **more: Any,
    ) -> AttentionOutput:  # fmt: skip
        """Packed attention; ``queries`` and ``keys`` bound the lengths. A shard gives an fp32 partial."""
        options = self._options | {"out_dtype": self._out_dtype} | more
        if shard is not None:
            options |= {"out_dtype": torch.float32, "kv_start": shard.start, **shard.options}
        return flash_attention_varlen(
            q, k, v, cu_q, cu_k, queries, keys, seqused_k=used_k, impl=self.impl, **options
        )

    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_q: Tensor, used_k: Tensor, table: Tensor, queries: int,
        keys: int, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None, out: Tensor | None = None,
    ) -> AttentionOutput:  # fmt: skip
        """Packed queries over pages; ``out`` is where to write."""
        return flash_attention_paged(
            q, k_cache, v_cache, cu_q, used_k, table, queries, keys, k_scale=k_scale, v_scale=v_scale, impl=self.impl,
            out=out, out_dtype=self._out_dtype, **self._options,
        )  # fmt: skip


class Reference:
    """`attention_reference` in fp32: every score at once, no schedule, no promise about bits."""

    name = REFERENCE
    source = "rl_attn_plugin.reference"
    impl = Impl.AUTO  # of cache writes and merges, which have no reference of their own
    schedule_id: str | None = None

    def __init__(self, inputs: AttentionComparisonInputs) -> None:
        self._out_dtype = inputs.out_dtype
        self._options = _options(inputs)

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, queries: int, keys: int,
        *, used_k: Tensor | None = None, shard: Shard | None = None,
    ) -> AttentionOutput:  # fmt: skip
        """As `Kernels.varlen`."""
        options, dtype = dict(self._options), self._out_dtype
        starts = [0] * (len(cu_q) - 1)
        if shard is not None:
            options, dtype, starts = options | shard.options, torch.float32, shard.start.tolist()
        firsts = cu_k.tolist()
        counts = [b - a for a, b in pairwise(firsts)] if used_k is None else used_k.tolist()
        parts = [
            attention_reference(
                q[a:b], k[first : first + n], v[first : first + n], kv_start=start, dtype=torch.float32, **options
            )
            for (a, b), first, n, start in zip(
                pairwise(cu_q.tolist()), firsts, counts, starts, strict=False
            )
        ]  # fmt: skip
        return AttentionOutput(
            torch.cat([out for out, _ in parts]).to(dtype), torch.cat([lse for _, lse in parts], dim=1)
        )

    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_q: Tensor, used_k: Tensor, table: Tensor, queries: int,
        keys: int, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None, out: Tensor | None = None,
    ) -> AttentionOutput:  # fmt: skip
        """As `Kernels.paged`: pages are put in order first."""
        size = k_cache.shape[1]
        used = used_k.tolist()
        pages = [table[b, : -(-n // size)].long() for b, n in enumerate(used)]

        def ordered(cache: Tensor, scale: Tensor | None) -> Tensor:
            x = torch.cat([cache[p].flatten(0, 1)[:n].float() for p, n in zip(pages, used, strict=True)])
            return x if scale is None else x * scale.reshape(-1, 1)

        bounds = torch.nn.functional.pad(used_k.cumsum(0), (1, 0)).int()
        found = self.varlen(
            q, ordered(k_cache, k_scale), ordered(v_cache, v_scale), cu_q, bounds, queries, keys
        )
        return found if out is None else found._replace(out=out.copy_(found.out))


Backend = Kernels | Reference


def backend_of(inputs: AttentionComparisonInputs, impl: Impl | str) -> Backend:
    """What ``impl`` names: ``"reference"``, or the kernels of ``"auto"``, ``"triton"`` or ``"torch"``.

    Raises:
        ValueError: an unknown name, or one that cannot be met here, with every reason.
    """
    return Reference(inputs) if impl == REFERENCE else Kernels(inputs, impl)


def _options(inputs: AttentionComparisonInputs) -> dict[str, Any]:
    return {
        "causal": inputs.causal, "scale": inputs.scale, "window": inputs.window, "softcap": inputs.softcap,
        "sinks": inputs.sinks,
    }  # fmt: skip

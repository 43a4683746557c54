"""A paged KV cache that is a transformers `Cache`, and the forward that drives it.

Sequences come and go by key; each owns pages of every layer. A step packs the new tokens of any number of
sequences (prompt chunks, decoded tokens, both) into one ``[1, T]`` forward.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from rl_attn_plugin.ops.attention import flash_attention_paged
from rl_attn_plugin.ops.cache import write_kv_cache


@dataclass(frozen=True, slots=True)
class Step:
    """Where the new tokens of one forward go; tensors on the model's device.

    Attributes:
        cu_seqlens_q: int32 ``[n + 1]`` offsets of the sequences' new tokens.
        seqlens_k: int32 ``[n]`` tokens of each sequence, new ones included.
        block_table: int32 ``[n, max_pages]``, -1 past a sequence's pages.
        slots: int64 ``[T]`` where each new token is written.
        max_seqlen_q: most new tokens of a sequence.
        max_seqlen_k: longest sequence.
    """

    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    block_table: Tensor
    slots: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(slots=True)
class _Owned:
    length: int = 0
    pages: list[int] = field(default_factory=list)


class PagedCache(Cache):
    """Keys and values of many sequences in pages of ``page_size`` tokens, one pair of tensors a layer.

    Pages are not initialised and a freed page is not cleared: attention reads only what was written for the
    sequence at hand.
    """

    def __init__(
        self, num_layers: int, num_pages: int, page_size: int, *, page_order: Iterable[int] | None = None
    ) -> None:
        """Make an empty cache; the layers' tensors are allocated when they are first written.

        Args:
            num_layers: layers of the model.
            num_pages: pages of each layer.
            page_size: tokens a page.
            page_order: the order in which pages are handed out; default ascending.

        Raises:
            ValueError: for sizes below 1, or an order that is not one of all pages.
        """
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                "num_pages and page_size must be at least 1, "
                f"got num_pages={num_pages}, page_size={page_size}"
            )
        order = list(range(num_pages) if page_order is None else page_order)
        if sorted(order) != list(range(num_pages)):
            raise ValueError(f"page_order must name each of {num_pages} pages once, got {order[:20]}")
        super().__init__(layers=[])
        self.num_pages, self.page_size = num_pages, page_size
        self._free = order[::-1]  # handed out from the end
        self._owned: dict[Hashable, _Owned] = {}
        self._caches: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._step: Step | None = None

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence owns."""
        return len(self._free)

    def add(self, sequence: Hashable) -> None:
        """Start an empty sequence.

        Raises:
            ValueError: when it is there already.
        """
        if sequence in self._owned:
            raise ValueError(f"sequence {sequence!r} must be new to the cache, got one it holds")
        self._owned[sequence] = _Owned()

    def free(self, sequence: Hashable) -> None:
        """Give a sequence's pages back.

        Raises:
            KeyError: when the cache does not hold it.
        """
        self._free += self._get(sequence).pages[::-1]
        del self._owned[sequence]

    def length(self, sequence: Hashable) -> int:
        """Tokens written for a sequence.

        Raises:
            KeyError: when the cache does not hold it.
        """
        return self._get(sequence).length

    def _get(self, sequence: Hashable) -> _Owned:
        if sequence not in self._owned:
            raise KeyError(f"sequence {sequence!r} is not in the cache, which holds {list(self._owned)[:20]}")
        return self._owned[sequence]

    def begin(self, new_tokens: Mapping[Hashable, int], device: torch.device) -> Step:
        """Take pages for new tokens and fix where the next forward writes and reads.

        Raises:
            KeyError: for a sequence the cache does not hold.
            ValueError: when a sequence brings no token.
            RuntimeError: when there are too few free pages; nothing has changed then.
        """
        size = self.page_size
        needed = 0
        for sequence, count in new_tokens.items():
            owned = self._get(sequence)
            if count < 1:
                raise ValueError(f"sequence {sequence!r} must bring at least one token, got {count}")
            needed += -(-(owned.length + count) // size) - len(owned.pages)
        if needed > len(self._free):
            raise RuntimeError(
                f"the cache needs {needed} more pages of {size} tokens and has {len(self._free)} of "
                f"{self.num_pages} free: free finished sequences or make the cache larger"
            )
        slots: list[int] = []
        offsets = [0]
        every = []
        for sequence, count in new_tokens.items():
            owned = self._owned[sequence]
            while len(owned.pages) * size < owned.length + count:
                owned.pages.append(self._free.pop())
            slots += [
                owned.pages[i // size] * size + i % size for i in range(owned.length, owned.length + count)
            ]
            owned.length += count
            offsets.append(offsets[-1] + count)
            every.append(owned)
        width = max(len(owned.pages) for owned in every)
        table = [owned.pages + [-1] * (width - len(owned.pages)) for owned in every]

        def ints(values: list[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self._step = Step(
            cu_seqlens_q=ints(offsets),
            seqlens_k=ints([owned.length for owned in every]),
            block_table=ints(table),
            slots=torch.tensor(slots, device=device),
            max_seqlen_q=max(new_tokens.values()),
            max_seqlen_k=max(owned.length for owned in every),
        )
        return self._step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values ``[1, Hkv, T, D]``; called by the model's attention layers.

        Raises:
            RuntimeError: outside of `paged_forward`, which prepares the step.
        """
        if self._step is None:
            raise RuntimeError(
                "PagedCache must be driven by paged_forward with attn_implementation='rl_attn', "
                f"got a direct update of layer {layer_idx}"
            )
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        caches = self._caches[layer_idx]
        if caches is None:
            shapes = [(self.num_pages, self.page_size, *x.shape[1:]) for x in (k, v)]
            caches = k.new_empty(shapes[0]), v.new_empty(shapes[1])
            self._caches[layer_idx] = caches
        write_kv_cache(k, v, *caches, self._step.slots)
        return key_states, value_states

    def attend(self, layer_idx: int, q: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Attention of a step's queries ``[1, T, Hq, D]`` over a layer's pages: ``[1, T, Hq, Dv]``.

        Raises:
            RuntimeError: when the layer's new keys were not written first.
        """
        step, caches = self._step, self._caches[layer_idx]
        if step is None or caches is None:
            raise RuntimeError(
                f"layer {layer_idx} must update the cache before it attends, got no keys of it"
            )
        return flash_attention_paged(
            q[0],
            *caches,
            step.cu_seqlens_q,
            step.seqlens_k,
            step.block_table,
            step.max_seqlen_q,
            step.max_seqlen_k,
            **options,
        ).out[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest sequence; positions are always given explicitly."""
        return max((owned.length for owned in self._owned.values()), default=0)

    @property
    def is_sliding(self) -> list[bool]:
        """Windows are applied by the attention; every layer keeps all its keys."""
        return [False] * len(self._caches)


def paged_forward(
    model: PreTrainedModel,
    cache: PagedCache,
    tokens: Mapping[Any, Sequence[int]],
    keep: Mapping[Any, int],
) -> dict[Any, Tensor]:
    """Feed new tokens of any number of sequences through the model in one packed forward.

    Args:
        model: with ``attn_implementation="rl_attn"``.
        cache: holds every sequence named.
        tokens: new token ids of each sequence, at least one each.
        keep: of how many of a sequence's last new tokens to return logits.

    Returns:
        For each sequence with ``keep > 0``, fp32 logits ``[keep, V]``: entry i predicts what follows that
        token.

    Raises:
        KeyError, ValueError, RuntimeError: see `PagedCache.begin`; ValueError too when ``keep`` exceeds what
            was fed.
    """
    for sequence, count in keep.items():
        most = len(tokens.get(sequence, ()))
        if not 0 <= count <= most:
            raise ValueError(f"keep of sequence {sequence!r} must be 0 to its new tokens {most}, got {count}")
    positions: list[int] = []
    kept: list[int] = []
    for sequence, new in tokens.items():
        start = cache.length(sequence)
        positions += range(start, start + len(new))
        kept += range(len(positions) - keep.get(sequence, 0), len(positions))
    device = model.device
    cache.begin({sequence: len(new) for sequence, new in tokens.items()}, device)
    # four dimensions: transformers hands such a mask on untouched, and the paged step makes any mask needless
    no_mask = torch.empty(1, 1, 1, 0, dtype=torch.int32, device=device)
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([[i for new in tokens.values() for i in new]], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=no_mask,
            **{cache_argument(model): cache},
            paged_cache=cache,  # models hand unknown arguments on to the attention function
            use_cache=True,
            logits_to_keep=torch.tensor(kept, dtype=torch.int64, device=device),
        ).logits[0]
    parts = logits.float().split([keep[s] for s in tokens if keep.get(s)])
    return dict(zip((s for s in tokens if keep.get(s)), parts, strict=True))


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the cache among the model's arguments: ``past_key_values`` until transformers 5.2x."""
    import inspect

    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"

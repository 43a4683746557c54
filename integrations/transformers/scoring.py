"""Log-probs of given tokens the way a trainer computes them: sequences packed into full prefills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_attn_plugin.integrations.transformers.attention import NAME
from rl_attn_plugin.integrations.transformers.native_masks import masks_from_positions
from rl_attn_plugin.integrations.transformers.switch import attention_implementation
from rl_attn_plugin.logprobs import token_logps


def score_packed(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    starts: Sequence[int] | None = None,
    attn_implementation: str = NAME,
    max_tokens_per_pack: int = 4096,
) -> list[Tensor]:
    """Score sequences in packed full prefills, fp32 log-softmax of logits / temperature.

    Nothing is shifted: entry j of the result for sequence i is the log-prob of
    ``sequences[i][starts[i] + j]`` given everything before it.

    Args:
        model: a causal language model.
        sequences: token ids.
        temperature: what the logits are divided by.
        starts: first token of each sequence to score, at least 1; default 1.
        attn_implementation: ``"rl_attn"``, packed by offsets, or ``"sdpa"`` or ``"eager"``, packed by a
            block-diagonal mask.
        max_tokens_per_pack: sequences are packed in order up to this many tokens; a longer one runs alone.

    Returns:
        fp32 ``[L - start]`` on the CPU for each sequence.

    Raises:
        ValueError: for a start outside ``1 .. L`` or a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    starts = [1] * len(sequences) if starts is None else starts
    for i, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        if not 1 <= start <= len(sequence):
            raise ValueError(f"starts[{i}] must be 1 to the sequence's length {len(sequence)}, got {start}")
    result: list[Tensor] = []
    with torch.no_grad(), attention_implementation(model, attn_implementation):
        for pack in _packs([len(s) for s in sequences], max_tokens_per_pack):
            result += _score(
                model,
                [sequences[i] for i in pack],
                [starts[i] for i in pack],
                temperature,
                attn_implementation,
            )
    return result


def _packs(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    pack: list[int] = []
    used = 0
    for i, length in enumerate(lengths):
        if pack and used + length > most:
            yield pack
            pack, used = [], 0
        pack.append(i)
        used += length
    if pack:
        yield pack


def _score(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    temperature: float,
    attn_implementation: str,
) -> list[Tensor]:
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    offsets = [0]
    for sequence, start in zip(sequences, starts, strict=True):
        rows += range(len(ids) + start - 1, len(ids) + len(sequence) - 1)
        targets += sequence[start:]
        ids += sequence
        positions += range(len(sequence))
        owners += [len(offsets)] * len(sequence)
        offsets.append(len(ids))
    device = model.device

    def longs(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    packing: dict[str, Any] = {}
    if attn_implementation == NAME:
        longest = max(map(len, sequences))
        cu = longs(offsets).int()
        packing = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
    else:
        at, owner = longs(positions)[None], longs(owners)[None]
        same = owner[:, :, None] == owner[:, None, :]
        packing = {"attention_mask": masks_from_positions(model, attn_implementation, at, at, same)}
    logits = model(
        input_ids=longs(ids)[None],
        position_ids=longs(positions)[None],
        use_cache=False,
        logits_to_keep=longs(rows),
        **packing,
    ).logits[0]
    logps = token_logps(logits, longs(targets), temperature).cpu()
    return list(logps.split([len(s) - start for s, start in zip(sequences, starts, strict=True)]))

"""The tokens with the largest abs(dlogp) and a sample of the invalid ones, the same however the tokens were batched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rl_attn_plugin.monitor.settings import Settings
from rl_attn_plugin.monitor.state import State
from rl_attn_plugin.monitor.tokens import Tokens

_UNKNOWN = -1
_COLUMNS = 4  # step, sequence, position, token
_HASH_BITS = 31
# odd numbers below 2^63 with their bits spread evenly
_ODD = (0x1E3779B97F4A7C15, 0x42B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x56E8FEB86659FD93, 0x20761D6478BD642F)


class Tokenizer(Protocol):
    """Anything that turns token ids into text."""

    def decode(self, ids: list[int], /) -> str:
        """Text of some tokens."""
        ...


@dataclass(frozen=True, slots=True)
class DriftedToken:
    """A token with a large abs(dlogp), or one whose log-prob is none.

    Attributes:
        step: of the update that held it.
        sequence: its sequence id; None where not given.
        position: its position; None where not known.
        token_id: the token; None where not given.
        groups: label by group; None where not given.
        logp_trainer: nats.
        logp_rollout: nats.
        dlogp: their difference; NaN or infinite where one is.
        before: ids of the active tokens of its sequence right before it.
        after: ids of those right after it.
        text: the token decoded; None without a tokenizer or ids.
        text_before: what is before it, likewise.
        text_after: what is after it, likewise.
    """

    step: int
    sequence: int | None
    position: int | None
    token_id: int | None
    groups: dict[str, str | None]
    logp_trainer: float
    logp_rollout: float
    dlogp: float
    before: list[int]
    after: list[int]
    text: str | None = None
    text_before: str | None = None
    text_after: str | None = None


class Ranked(NamedTuple):
    """One update's tokens to show: row 0 those with the largest abs(dlogp), row 1 a sample of those that are invalid.

    Attributes:
        keys: int64 ``[2, K]``, descending; -1 where there is none.
        logps: fp64 ``[2, K, 2]``, trainer and rollout as handed over.
        places: int64 ``[2, K, ..]``: step, sequence, position, token, a label for each group, the tokens around.
    """

    keys: Tensor
    logps: Tensor
    places: Tensor


def places(settings: Settings) -> int:
    """Columns of a place."""
    return _COLUMNS + len(settings.groups) + sum(settings.context)


def rank(tokens: Tokens, size: Tensor, step: int, settings: Settings) -> Ranked:
    """The tokens of one update to show.

    The rank is abs(dlogp) rounded to float32; among equals, and among invalid tokens, a hash of the token's place and
    values decides, so that the choice does not depend on batching. A token that does not drift is never among the worst.

    Args:
        tokens: of the update.
        size: fp64 ``[T]``, abs(dlogp), 0 where not compared.
        step: of the update.
        settings: of the monitor.
    """
    known = (tokens.sequence_id, tokens.position, tokens.token_id)
    low = _hash((tokens.given_trainer, tokens.given_rollout), known, step)
    high = size.float().view(torch.int32).long() << _HASH_BITS
    invalid = tokens.active & ~tokens.compared
    # or with -1, which has all bits set, is -1
    keys = torch.stack([high | low | -(size == 0).long(), low | -(~invalid).long()])
    best = keys.topk(min(settings.worst, keys.shape[1]), dim=1)
    at = best.indices.flatten()
    columns = [_column(x, at) for x in known]
    columns += [_column(tokens.groups.get(name), at) for name in settings.groups]
    found = torch.stack([torch.full_like(at, step), *columns], dim=1)
    logps = torch.stack([tokens.given_trainer[at].double(), tokens.given_rollout[at].double()], dim=1)
    all_places = torch.cat([found, _around(tokens, at, settings)], dim=1)
    ranked = Ranked(best.values, logps.view(2, -1, 2), all_places.view(2, -1, all_places.shape[1]))
    return _padded(ranked, settings.worst)


def shown(
    state: State, settings: Settings, row: int, tokenizer: Tokenizer | None = None
) -> list[DriftedToken]:
    """The worst tokens of a state on the CPU (row 0), largest abs(dlogp) first, or a sample of the invalid ones (row 1).

    Args:
        state: of a monitor.
        settings: of the same.
        row: 0 or 1.
        tokenizer: for text.
    """
    lists = (state.ranked_keys, state.ranked_logps, state.ranked_places)
    rows = zip(*(x[row].tolist() for x in lists), strict=True)
    found = [_token(logps, place, settings, tokenizer) for key, logps, place in rows if key >= 0]
    return sorted(found, key=_by_drift if row == 0 else _by_place)


def _token(
    logps: list[float], place: list[int], settings: Settings, tokenizer: Tokenizer | None
) -> DriftedToken:
    before, _ = settings.context
    start = _COLUMNS + len(settings.groups)
    step, sequence, position, token = place[:_COLUMNS]
    labels = zip(settings.groups.items(), place[_COLUMNS:start], strict=True)
    ids = [token] if token != _UNKNOWN else []
    left = [i for i in place[start : start + before] if i != _UNKNOWN]
    right = [i for i in place[start + before :] if i != _UNKNOWN]
    return DriftedToken(
        step=step,
        sequence=_known(sequence),
        position=_known(position),
        token_id=_known(token),
        groups={name: names[i] if 0 <= i < len(names) else None for (name, names), i in labels},
        logp_trainer=logps[0],
        logp_rollout=logps[1],
        dlogp=logps[0] - logps[1],
        before=left,
        after=right,
        text=_text(tokenizer, ids),
        text_before=_text(tokenizer, left) if ids else None,
        text_after=_text(tokenizer, right) if ids else None,
    )


def _hash(values: tuple[Tensor, ...], places: tuple[Tensor | None, ...], step: int) -> Tensor:
    """31 bits of what identifies a token."""
    mixed = torch.full_like(values[0], step, dtype=torch.int64)
    for odd, x in zip(_ODD, (*values, *places), strict=True):
        if x is not None:
            bits = x.double().view(torch.int64) if x.is_floating_point() else x
            mixed = (mixed ^ bits) * odd
    folded: Tensor = (mixed ^ (mixed >> 32)) * _ODD[0]
    short: Tensor = (folded >> 33) & (2**_HASH_BITS - 1)
    return short


def _by_place(token: DriftedToken) -> tuple[float, ...]:
    places = (token.sequence, token.position, token.token_id)
    return (token.step, *(_UNKNOWN if x is None else x for x in places))


def _by_drift(token: DriftedToken) -> tuple[float, ...]:
    return (-abs(token.dlogp), *_by_place(token), token.logp_rollout)


def _around(tokens: Tokens, at: Tensor, settings: Settings) -> Tensor:
    before, after = settings.context
    if tokens.token_id is None or tokens.segment is None:
        return torch.full((at.numel(), before + after), _UNKNOWN, dtype=torch.int64, device=at.device)
    count = tokens.token_id.numel()
    steps = torch.arange(before + after, device=at.device) - before
    steps += (steps >= 0).long()  # the token itself is not its context
    # in steps over active tokens, so that what is masked out in between does not matter
    index = torch.arange(count, device=at.device)
    at_rank = tokens.rank.new_zeros(count + 1).scatter_(0, tokens.rank.where(tokens.active, count), index)
    ranks = tokens.rank[at][:, None] + steps
    inside = (ranks >= 0) & (ranks <= tokens.rank[-1])
    near = at_rank[ranks.clamp(0, count - 1)]
    inside &= tokens.segment[near] == tokens.segment[at][:, None]
    return tokens.token_id[near].where(inside, _UNKNOWN)


def _column(values: Tensor | None, at: Tensor) -> Tensor:
    return torch.full_like(at, _UNKNOWN) if values is None else values[at]


def _padded(ranked: Ranked, size: int) -> Ranked:
    lacking = size - ranked.keys.shape[1]
    return Ranked(
        torch.nn.functional.pad(ranked.keys, (0, lacking), value=-1),
        torch.nn.functional.pad(ranked.logps, (0, 0, 0, lacking)),
        torch.nn.functional.pad(ranked.places, (0, 0, 0, lacking)),
    )


def _known(value: int) -> int | None:
    return None if value == _UNKNOWN else value


def _text(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str | None:
    return None if tokenizer is None else tokenizer.decode(list(ids)) if ids else ""

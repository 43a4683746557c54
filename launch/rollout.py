"""The rollout side on top of a `Session`: sampling, recording, and the two replays.

Nothing here knows the framework or Ray. The batch composition of every path is decided here, from the shard
alone, so that a shard which is done again gives the same tokens and the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl_attn_plugin.launch.config import Sampling
from rl_attn_plugin.launch.policies.base import Policy, Session
from rl_attn_plugin.logprobs import token_logps


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt of a shard; ``sample`` is its number in the whole job."""

    sample: int
    prompt: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the rollout answered.

    Attributes:
        tokens: the answer, with the stop token if it stopped.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    tokens: tuple[int, ...]
    finish_reason: str


def draw(logits: Tensor, sampling: Sampling, sample: int, step: int) -> int:
    """The token that ``sample`` takes at ``step``: nucleus sampling by inverting the CDF.

    The uniform number is a function of (seed, sample, step) alone: it does not depend on who else is in the
    batch, and a restart finds it again.

    Args:
        logits: ``[V]``.
        sampling: temperature, top-p and seed.
        sample: number of the sample in the job.
        step: index of the new token in its completion.
    """
    generator = np.random.Generator(
        np.random.Philox(key=np.array([sampling.seed, sample], np.uint64), counter=step)
    )
    scaled = logits.double().cpu() / sampling.temperature
    ordered, order = torch.softmax(scaled, dim=-1).sort(descending=True, stable=True)
    cumulative = ordered.cumsum(0)
    # The smallest set of most likely tokens whose probability reaches top_p; never empty.
    size = int(torch.searchsorted(cumulative, sampling.top_p).item()) + 1
    nucleus = cumulative[: min(size, len(cumulative))]
    target = generator.random() * nucleus[-1]
    index = int(torch.searchsorted(nucleus, target, right=True).item())
    return int(order[min(index, len(nucleus) - 1)])


def prefill(
    session: Session, rows: Mapping[int, Sequence[int]], keep: Mapping[int, int], chunk_size: int
) -> dict[int, Tensor]:
    """Feeds whole sequences in chunks; returns the logits of each row's last ``keep`` tokens, ``[keep,
    V]``."""
    kept: dict[int, list[Tensor]] = {row: [] for row in rows}
    for start in range(0, max(map(len, rows.values())), chunk_size):
        chunk = {
            row: tokens[start : start + chunk_size] for row, tokens in rows.items() if start < len(tokens)
        }
        wanted = {}
        for row, tokens in chunk.items():
            first = len(rows[row]) - keep[row]  # absolute index of the first kept token
            wanted[row] = min(len(tokens), max(0, start + len(tokens) - first))
        for row, logits in session.feed(chunk, wanted).items():
            kept[row].append(logits)
    return {row: torch.cat(parts) for row, parts in kept.items() if parts}


def sample_and_record(
    policy: Policy, arm: str, requests: Sequence[Request], sampling: Sampling, chunk_size: int
) -> tuple[list[Completion], list[np.ndarray]]:
    """The rollout itself: chunked prefill, then decoding the whole shard together, with each token's
    log-prob."""
    return _decode(policy, arm, requests, None, sampling, chunk_size, scatter_pages=False)


def record_given(
    policy: Policy,
    arm: str,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    sampling: Sampling,
    chunk_size: int,
) -> list[np.ndarray]:
    """What `sample_and_record` would have recorded had it drawn these tokens: same batches, step for step."""
    return _decode(policy, arm, requests, completions, sampling, chunk_size, scatter_pages=False)[1]


def replay_chunked(
    policy: Policy,
    arm: str,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    sampling: Sampling,
    chunk_size: int,
) -> list[np.ndarray]:
    """Prompt and answer together as one chunked prefill."""
    rows = {
        row: (*request.prompt, *done.tokens)
        for row, (request, done) in enumerate(zip(requests, completions, strict=True))
    }
    session = policy.open(arm, [len(tokens) for tokens in rows.values()])
    # The last token predicts nothing that was sampled, so it is not fed.
    fed = {row: tokens[:-1] for row, tokens in rows.items()}
    logits = prefill(
        session, fed, {row: len(done.tokens) for row, done in enumerate(completions)}, chunk_size
    )
    return [
        token_logps(logits[row], torch.tensor(done.tokens, device=logits[row].device), sampling.temperature)
        .cpu()
        .numpy()
        for row, done in enumerate(completions)
    ]


def replay_decode(
    policy: Policy,
    arm: str,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    sampling: Sampling,
    chunk_size: int,
) -> list[np.ndarray]:
    """Decoding again with given tokens, in other batches (last half first, each in reverse) and other
    pages."""
    order = list(reversed(range(len(requests))))
    half = (len(order) + 1) // 2
    replayed: dict[int, np.ndarray] = {}
    for group in (order[:half], order[half:]):
        if not group:
            continue
        members = [requests[index] for index in group]
        given = [completions[index] for index in group]
        _, logps = _decode(policy, arm, members, given, sampling, chunk_size, scatter_pages=True)
        replayed.update(zip(group, logps, strict=True))
    return [replayed[index] for index in range(len(requests))]


def _decode(
    policy: Policy,
    arm: str,
    requests: Sequence[Request],
    given: Sequence[Completion] | None,
    sampling: Sampling,
    chunk_size: int,
    *,
    scatter_pages: bool,
) -> tuple[list[Completion], list[np.ndarray]]:
    """One batch, decoded together; rows leave it as they finish. Tokens are drawn, or taken from
    ``given``."""
    session = policy.open(
        arm,
        [len(request.prompt) + sampling.max_new_tokens for request in requests],
        scatter_pages=scatter_pages,
    )
    rows = range(len(requests))
    logits = prefill(session, {row: requests[row].prompt for row in rows}, dict.fromkeys(rows, 1), chunk_size)
    tokens: list[list[int]] = [[] for _ in rows]
    logps: list[list[Tensor]] = [[] for _ in rows]
    reasons = ["length"] * len(requests)
    active = list(rows)
    for step in range(sampling.max_new_tokens):
        batch = torch.cat([logits[row] for row in active])
        if given is None:
            chosen = [draw(batch[i], sampling, requests[row].sample, step) for i, row in enumerate(active)]
        else:
            chosen = [given[row].tokens[step] for row in active]
        scored = token_logps(batch, torch.tensor(chosen, device=batch.device), sampling.temperature).cpu()
        finished = []
        for i, row in enumerate(active):
            tokens[row].append(chosen[i])
            logps[row].append(scored[i])
            stopped = chosen[i] in policy.stop_ids if given is None else step + 1 == len(given[row].tokens)
            if stopped:
                finished.append(row)
                reasons[row] = "stop" if given is None else given[row].finish_reason
        active = [row for row in active if row not in finished]
        if not active or step + 1 == sampling.max_new_tokens:
            break
        if finished:
            session.close_rows(finished)
        logits = session.feed({row: [tokens[row][-1]] for row in active}, dict.fromkeys(active, 1))
    completions = [
        Completion(tokens=tuple(ids), finish_reason=reason)
        for ids, reason in zip(tokens, reasons, strict=True)
    ]
    return completions, [torch.stack(values).numpy() for values in logps]

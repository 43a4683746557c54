"""The two sides as plain classes; the job makes Ray actors of them.

Both are stateless between calls but for the model: a call depends on its arguments alone, so a worker that
died is replaced by a new one and the shard is simply done again.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_attn_plugin.invariant import AuditReport
from rl_attn_plugin.launch.config import Sampling
from rl_attn_plugin.launch.policies.base import Policy, PolicyIdentity, PolicySpec
from rl_attn_plugin.launch.rollout import (
    Completion,
    Request,
    record_given,
    replay_chunked,
    replay_decode,
    sample_and_record,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Log-probs of the completion tokens of a shard, one fp32 array a sample, and the seconds they took."""

    logps: list[np.ndarray]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """The tokens of a shard with the log-probs recorded while they were drawn."""

    completions: list[Completion]
    recorded: Scored


class _Worker:
    def load(self, spec: PolicySpec) -> PolicyIdentity:
        """Loads the model and says what was loaded.

        Not done by the constructor, so that an error in it is this call's error and not the death of an
        actor.
        """
        self._policy: Policy = load_policy(spec)
        self._audit = AuditReport()
        return self._policy.identity()

    @contextmanager
    def _computing(self, arm: str) -> Iterator[None]:
        with self._policy.computing(arm) as mode:
            yield
        if mode is not None:
            self._audit += mode.report()

    def audit(self) -> dict[str, Any]:
        """Every operator that ran inside the batch-invariant mode, by what is known of it."""
        return self._audit.to_dict()

    def peak_mib(self) -> int:
        """Most memory this process has held, in MiB."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


class TrainerWorker(_Worker):
    """Scores whole sequences the way a trainer does: one packed full prefill."""

    def score(self, arm: str, requests: Sequence[Request], sampled: Sampled, temperature: float) -> Scored:
        """Log-probs of the completions of a shard."""
        start = time.perf_counter()
        sequences = [
            (*request.prompt, *done.tokens)
            for request, done in zip(requests, sampled.completions, strict=True)
        ]
        with self._computing(arm):
            scores = self._policy.score(
                arm, sequences, [len(request.prompt) for request in requests], temperature
            )
        logps = [score.numpy() for score in scores]
        return Scored(logps=logps, seconds=time.perf_counter() - start)

    def compare_layers(
        self, sequences: Sequence[Sequence[int]], layers: Sequence[int], chunk_size: int, page_size: int
    ) -> list[dict[str, Any]]:
        """Layers of this worker's model, on these tokens, through every path of the replay harness.

        Returns:
            `AttentionComparisonReport.to_dict` of each layer.
        """
        from rl_attn_plugin.replay import compare_attention

        return [
            compare_attention(
                inputs,
                query_chunk_size=chunk_size,
                kv_page_size=page_size,
                require_transformer_engine=True,
                label=label,
            ).to_dict()
            for label, inputs in self._policy.attention_inputs(sequences, layers).items()
        ]


class RolloutWorker(_Worker):
    """Samples with chunked prefill and decode, records, and replays given tokens."""

    def sample(self, arm: str, requests: Sequence[Request], sampling: Sampling, chunk_size: int) -> Sampled:
        """Draws the completions of a shard with the arm's attention."""
        start = time.perf_counter()
        with self._computing(arm):
            completions, logps = sample_and_record(self._policy, arm, requests, sampling, chunk_size)
        return Sampled(
            completions=completions, recorded=Scored(logps=logps, seconds=time.perf_counter() - start)
        )

    def replay(
        self,
        arm: str,
        path: str,
        requests: Sequence[Request],
        sampled: Sampled,
        sampling: Sampling,
        chunk_size: int,
    ) -> Scored:
        """Log-probs of given completions along ``path``: ``recorded``, ``chunked_prefill`` or
        ``decode_replay``."""
        replay = {
            "recorded": record_given,
            "chunked_prefill": replay_chunked,
            "decode_replay": replay_decode,
        }[path]
        start = time.perf_counter()
        with self._computing(arm):
            logps = replay(self._policy, arm, requests, sampled.completions, sampling, chunk_size)
        return Scored(logps=logps, seconds=time.perf_counter() - start)


def load_policy(spec: PolicySpec) -> Policy:
    """The policy that ``spec`` asks for."""
    from rl_attn_plugin.launch.policies.transformers import TransformersPolicy

    return TransformersPolicy(spec)

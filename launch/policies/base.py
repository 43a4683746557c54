"""What the job asks of a framework: who are you, score these sequences, and let me feed you tokens.

A rollout is driven through one primitive, `Session.feed`: a chunk of a prompt, one decoded token, or any
mix over the batch. How tokens are chosen and in which batches they are fed is the job's business, and the
same for every framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rl_attn_plugin.invariant import Mode
from rl_attn_plugin.launch.config import Fault
from rl_attn_plugin.replay import AttentionComparisonInputs


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpec:
    """What a worker loads.

    Attributes:
        model: ``"smollm2"``, a folder or a hub id.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: name of a torch dtype.
        page_size: tokens per page of the paged cache.
        logits_dtype: ``"float32"`` widens the last layer, ``"model"`` leaves it as it is.
        fault: damage to do after the weights were hashed.
    """

    model: str
    device: str
    dtype: str
    page_size: int
    logits_dtype: str = "float32"
    fault: Fault = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyIdentity:
    """What two sides must agree on before their numbers may be compared.

    Attributes:
        weights_sha256: over all parameters and buffers by name, as loaded.
        tokenizer_sha256: over vocabulary, merges, special tokens and chat template.
        architecture: class and shape of the model, as one line.
        dtype: of the weights.
    """

    weights_sha256: str
    tokenizer_sha256: str
    architecture: str
    dtype: str


class Session(Protocol):
    """A batch of sequences with a KV cache, rows 0 .. n-1."""

    def feed(self, tokens: Mapping[int, Sequence[int]], keep: Mapping[int, int]) -> dict[int, Tensor]:
        """Appends tokens to rows.

        Args:
            tokens: new tokens of each row, at least one a row; rows that are left out wait.
            keep: for a row, of how many of its last new tokens to return the logits; 0 and absent mean none.

        Returns:
            For each kept row, fp32 logits ``[keep, V]``: entry i predicts what follows that token.
        """
        ...

    def close_rows(self, rows: Sequence[int]) -> None:
        """Takes finished rows out of the batch; they are never fed again."""
        ...


class Policy(Protocol):
    """A model on its device, with both arms of attention."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def identity(self) -> PolicyIdentity:
        """Hashes of what was loaded, taken before any injected fault."""
        ...

    def computing(self, arm: str) -> AbstractContextManager[Mode | None]:
        """What every computation of an arm runs inside: the batch-invariant mode for ``"zero-drift"``, else nothing."""
        ...

    def score(
        self, arm: str, sequences: Sequence[Sequence[int]], starts: Sequence[int], temperature: float
    ) -> list[Tensor]:
        """Log-probs of given sequences the trainer's way: all of them in one packed full prefill.

        Args:
            arm: ``"native"``, ``"plugin"`` or ``"zero-drift"``.
            sequences: token ids.
            starts: the first token of each sequence to score, at least 1.
            temperature: what the logits are divided by.

        Returns:
            For each sequence fp32 ``[L - start]`` on the CPU: entry j is the log-prob of token ``start +
            j`` given those before it.
        """
        ...

    def attention_inputs(
        self, sequences: Sequence[Sequence[int]], layers: Sequence[int]
    ) -> dict[str, AttentionComparisonInputs]:
        """What layers hand to their attention in a full prefill of whole sequences.

        Args:
            sequences: token ids.
            layers: indices, negative ones from the end; empty for the first, the middle and the last.

        Returns:
            By label, on the model's device.
        """
        ...

    def open(self, arm: str, capacities: Sequence[int], *, scatter_pages: bool = False) -> Session:
        """Starts a batch.

        Args:
            arm: ``"native"``, ``"plugin"`` or ``"zero-drift"``.
            capacities: most tokens each row will hold.
            scatter_pages: place the rows' pages elsewhere than a fresh batch would.
        """
        ...

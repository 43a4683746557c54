"""The transformers policy: one model, both arms of attention.

The native arm is what transformers does by itself: sdpa, a `DynamicCache`, padded batches. The plugin arm
runs the same model with ``attn_implementation="rl_attn"``: packed batches over a paged cache. The zero-drift
arm does the same inside `batch_invariant`. The weights are loaded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rl_attn_plugin.integrations import transformers as plugin
from rl_attn_plugin.invariant import Mode, batch_invariant
from rl_attn_plugin.launch.config import Fault
from rl_attn_plugin.launch.policies.base import PolicyIdentity, PolicySpec, Session
from rl_attn_plugin.replay import AttentionComparisonInputs

ATTENTION = {"native": "sdpa", "plugin": "rl_attn", "zero-drift": "rl_attn"}


class Float32Head(torch.nn.Module):
    """The last layer with its weights and its product in fp32, for a model in a narrower dtype.

    bf16 logits come in steps of 0.125 at 16: rounding them adds noise of that size to every log-prob, which
    has nothing to do with how the rest was computed.
    """

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(head.weight.detach().float(), requires_grad=False)
        bias = getattr(head, "bias", None)
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach().float(), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[.., hidden] -> fp32 [.., V]``."""
        return torch.nn.functional.linear(hidden.float(), self.weight, self.bias)


class TransformersPolicy:
    """A transformers causal language model on one device.

    Args:
        spec: what to load; ``spec.fault`` is done after the weights were hashed.
    """

    def __init__(self, spec: PolicySpec) -> None:
        torch.set_grad_enabled(False)
        plugin.register()
        tokenizer = plugin.load_tokenizer(spec.model)
        self._model = plugin.load_model(spec.model, dtype=getattr(torch, spec.dtype), device=spec.device)
        self._page_size = spec.page_size
        config = self._model.config
        self._identity = PolicyIdentity(
            weights_sha256=plugin.weights_sha256(self._model),
            tokenizer_sha256=plugin.tokenizer_sha256(tokenizer),
            architecture=f"{type(self._model).__name__}, {config.num_hidden_layers} layers, "
            f"hidden {config.hidden_size}, vocabulary {config.vocab_size}",
            dtype=spec.dtype,
        )
        self.stop_ids = _stop_ids(self._model, tokenizer)
        _break(self._model, spec.fault)
        if spec.logits_dtype == "float32" and spec.dtype != "float32":
            self._model.set_output_embeddings(Float32Head(self._model.get_output_embeddings()))

    def identity(self) -> PolicyIdentity:
        """See `Policy.identity`."""
        return self._identity

    def computing(self, arm: str) -> AbstractContextManager[Mode | None]:
        """See `Policy.computing`."""
        return batch_invariant() if arm == "zero-drift" else nullcontext()

    def score(
        self, arm: str, sequences: Sequence[Sequence[int]], starts: Sequence[int], temperature: float
    ) -> list[Tensor]:
        """See `Policy.score`."""
        return plugin.score_packed(
            self._model, sequences, temperature=temperature, starts=starts, attn_implementation=ATTENTION[arm]
        )

    def attention_inputs(
        self, sequences: Sequence[Sequence[int]], layers: Sequence[int]
    ) -> dict[str, AttentionComparisonInputs]:
        """See `Policy.attention_inputs`; the layers before a captured one run the plugin's attention."""
        with plugin.attention_implementation(self._model, ATTENTION["plugin"]):
            return plugin.capture_attention_inputs(self._model, sequences, layers=layers or None)

    def open(self, arm: str, capacities: Sequence[int], *, scatter_pages: bool = False) -> Session:
        """See `Policy.open`."""
        if arm == "native":
            return plugin.NativeSession(self._model, len(capacities), attn_implementation=ATTENTION[arm])
        pages = sum(-(-capacity // self._page_size) for capacity in capacities)
        return plugin.PagedSession(
            self._model,
            len(capacities),
            num_pages=pages,
            page_size=self._page_size,
            page_order=_scattered(pages) if scatter_pages else None,
        )


def _scattered(pages: int) -> list[int]:
    """A fixed shuffle, far from the ascending order in which a fresh cache hands out its pages."""
    return torch.randperm(pages, generator=torch.Generator().manual_seed(pages)).tolist()


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = set(declared) if isinstance(declared, list) else {declared}
    return frozenset({*ids, tokenizer.eos_token_id} - {None})


def _break(model: Any, fault: Fault) -> None:
    """Damages a model on purpose, so that a user can see the job notice."""
    if fault == "weights":
        layers = [weight for name, weight in model.named_parameters() if name.endswith("o_proj.weight")]
        if not layers:
            raise ValueError("--inject-fault weights needs a model with o_proj layers")
        layers[len(layers) // 2].mul_(1.5)
    if fault == "rope":
        tables = [module.inv_freq for module in model.modules() if hasattr(module, "inv_freq")]
        if not tables:
            raise ValueError("--inject-fault rope needs a model with rotary embeddings")
        for inv_freq in tables:  # base ** -(i / n), so this multiplies the base by 4
            inv_freq.mul_(4.0 ** -(torch.arange(len(inv_freq), device=inv_freq.device) / len(inv_freq)))

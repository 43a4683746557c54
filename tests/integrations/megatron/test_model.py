"""Megatron-core's real GPT model with the plugin's attention, against the same model with Megatron's own."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install 'rl-attn-plugin[megatron]'")

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention

from rl_attn_plugin.integrations.megatron import CoreAttention
from tests.integrations.megatron.models import (
    DEVICE,
    VOCABULARY,
    assert_no_worse,
    config,
    latent_config,
    latent_model_with_their_core,
    local_spec,
    model,
    packed,
    positions,
)

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("default")]

CONFIGS: list[dict[str, Any]] = [
    {},
    {"num_query_groups": 4},
    {"num_query_groups": 1},
    {"window_size": (7, 0)},
    {"window_size": (5, 0), "window_attn_skip_freq": 2},
    {"softmax_type": "off-by-one"},
    {"softmax_type": "learnable"},
    {"softmax_scale": 0.4},
    {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
]


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def run(made: GPTModel, ids: Tensor, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradient of every parameter."""
    logits = made(ids, positions(*ids.shape), None, **options)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    return logits.detach(), {n: p.grad for n, p in made.named_parameters() if p.grad is not None}


def compare(ours: Any, theirs: Any, exact: Any) -> None:
    """Gradients by kind, over the layers: the errors of a single layer's four sinks are a throw of dice."""
    assert_no_worse(ours[0], theirs[0], exact[0], "logits")
    assert ours[1].keys() == theirs[1].keys() == exact[1].keys()
    kinds: dict[str, list[str]] = {}
    for name in ours[1]:
        kinds.setdefault(re.sub(r"layers\.\d+", "layers", name), []).append(name)
    for kind, names in kinds.items():
        assert_no_worse(
            *(torch.cat([found[1][name].flatten() for name in names]) for found in (ours, theirs, exact)),
            kind,
        )


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_logits_and_gradients_are_those_of_megatron_s_own_attention(changes: dict[str, Any]) -> None:
    made_for = config(**changes)
    ours, theirs = model(made_for), model(made_for, local_spec(made_for))
    for made, kind in ((ours, CoreAttention), (theirs, DotProductAttention)):
        assert all(type(layer.self_attention.core_attention) is kind for layer in made.decoder.layers)
    ids = tokens(3, 40)
    found, reference = run(ours, ids), run(theirs, ids)
    theirs.zero_grad()
    compare(found, reference, run(theirs.double(), ids))
    assert ("learnable" in changes.values()) == any("softmax_offset" in name for name in found[1])


@pytest.mark.parametrize("changes", [{}, {"window_size": (7, 0)}, {"softmax_type": "learnable"}], ids=str)
def test_packed_sequences_are_those_of_megatron_s_own_attention_one_by_one(changes: dict[str, Any]) -> None:
    """thd as Megatron-RL sends it: ghosts, a bound of the whole bin; Megatron's own attention takes no thd."""
    made_for = config(**changes)
    ours, theirs = model(made_for), model(made_for, local_spec(made_for))
    edges = [0, 13, 43, 44, 53]
    ids = tokens(1, 53)
    places = torch.cat([torch.arange(b - a) for a, b in pairwise(edges)]).to(DEVICE)

    def losses(made: GPTModel, pieces: bool) -> tuple[Tensor, dict[str, Tensor]]:
        if pieces:
            cuts = [ids[:, a:b] for a, b in pairwise(edges)]
            logits = torch.cat([made(cut, positions(1, cut.shape[1]), None) for cut in cuts], 1)
        else:
            sequences = packed(*edges, 53, 53, longest=64)
            logits = made(ids, places[None], None, packed_seq_params=sequences)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        return logits.detach(), {n: p.grad for n, p in made.named_parameters() if p.grad is not None}

    found, reference = losses(ours, False), losses(theirs, True)
    theirs.zero_grad()
    compare(found, reference, losses(theirs.double(), True))


@pytest.mark.usefixtures("no_te")
def test_multi_latent_attention() -> None:
    """q and k of 24 channels, v of 16, a scale of its own."""
    ours, theirs = model(latent_config()), latent_model_with_their_core()
    core = ours.decoder.layers[0].self_attention.core_attention
    assert core.softmax_scale == pytest.approx(24**-0.5) and core.hidden_size_per_attention_head_v == 16
    ids = tokens(2, 24)
    found, reference = run(ours, ids), run(theirs, ids)
    theirs.zero_grad()
    compare(found, reference, run(theirs.double(), ids))


@pytest.mark.usefixtures("no_te")
def test_multi_latent_attention_packed() -> None:
    made = model(latent_config())
    ids = tokens(1, 30)
    places = torch.cat([torch.arange(11), torch.arange(19)]).to(DEVICE)
    together = made(ids, places[None], None, packed_seq_params=packed(0, 11, 30, 30, longest=64))
    alone = [made(cut, positions(1, cut.shape[1]), None) for cut in (ids[:, :11], ids[:, 11:])]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


def test_selective_recompute_gives_the_same_gradients() -> None:
    found = []
    for changes in ({}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}):
        made = model(config(softmax_type="learnable", **changes)).train()
        calls: list[bool] = []
        attention = made.decoder.layers[0].self_attention
        attention.core_attention.register_forward_pre_hook(
            lambda *_, calls=calls: calls.append(torch.is_grad_enabled())
        )
        found.append(run(made, tokens(2, 16)))
        assert calls == (
            [False, True] if changes else [True]
        )  # once without a graph, once more in the backward
    (logits, gradients), (again, recomputed) = found
    assert torch.equal(logits, again) and gradients.keys() == recomputed.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, recomputed[name]), name


def test_fifty_steps_of_training_lose_the_same() -> None:
    made_for = config()
    curves = []
    for spec in (None, local_spec(made_for)):
        made = model(made_for, spec, seed=3)
        optimizer = torch.optim.AdamW(made.parameters(), lr=2e-3)
        random = torch.Generator().manual_seed(7)
        curve = []
        for _ in range(50):
            start = torch.randint(VOCABULARY, (4, 1), generator=random)
            ids = ((start + torch.arange(24) * 3) % VOCABULARY).to(DEVICE)
            logits = made(ids, positions(4, 24), None)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(torch.tensor(curve))
    torch.testing.assert_close(curves[0], curves[1], rtol=2e-3, atol=2e-3)
    assert curves[0][-1] < curves[0][0] / 2


def test_megatron_s_own_clipping_reads_the_largest_logits() -> None:
    made = model(config(qk_clip=True, qk_clip_threshold=0.5))
    attention = made.decoder.layers[0].self_attention
    before = attention.linear_qkv.weight.detach().clone()
    run(made, tokens(2, 16))
    assert attention.core_attention.current_max_attn_logits.shape == (4,)
    assert bool((attention.core_attention.current_max_attn_logits > 0.5).any())
    attention.clip_qk()
    assert attention.core_attention.current_max_attn_logits is None
    assert not torch.equal(attention.linear_qkv.weight, before)

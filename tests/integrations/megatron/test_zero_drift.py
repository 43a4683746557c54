"""Megatron's model in the batch-invariant mode: a row's bits do not depend on what came with it, forward and backward."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import rl_attn_plugin

pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install 'rl-attn-plugin[megatron]'")

from tests.integrations.megatron.models import DEVICE, VOCABULARY, config, model, packed, positions

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("default")]

EDGES = [0, 13, 53, 54, 150]


def one_bin(made: torch.nn.Module, ids: Tensor) -> Tensor:
    places = torch.cat([torch.arange(b - a) for a, b in pairwise(EDGES)]).to(DEVICE)
    logits: Tensor = made(ids, places[None], None, packed_seq_params=packed(*EDGES))
    return logits[0]


def one_by_one(made: torch.nn.Module, ids: Tensor) -> Tensor:
    cuts = (ids[:, a:b] for a, b in pairwise(EDGES))
    return torch.cat([made(cut, positions(1, cut.shape[1]), None)[0] for cut in cuts])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, {"window_size": (7, 0)}, {"recompute_granularity": "selective"}], ids=str
)
def test_packed_and_alone_have_the_same_bits(changes: dict[str, object], dtype: torch.dtype) -> None:
    made_for = config(hidden_size=192, ffn_hidden_size=320, num_layers=3, **changes)
    made = model(made_for).to(dtype)
    ids = torch.randint(VOCABULARY, (1, EDGES[-1]), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.no_grad():
        drift = one_bin(made, ids) - one_by_one(made, ids)
        with rl_attn_plugin.batch_invariant(strict=True) as mode:
            together, alone = one_bin(made, ids), one_by_one(made, ids)
    assert torch.equal(together, alone)
    assert not mode.report().unknown
    if dtype == torch.float32:
        assert drift.any()  # the control: plain products do drift at these shapes


def test_gradients_repeat_and_recomputation_changes_no_bit() -> None:
    """Megatron's selective recomputation runs the attention a second time; the mode holds there too."""
    ids = torch.randint(VOCABULARY, (1, EDGES[-1]), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = []
    for changes in ({}, {}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}):
        made = model(config(**changes)).train()
        with rl_attn_plugin.batch_invariant():
            logits = one_bin(made, ids)
            torch.nn.functional.cross_entropy(logits, ids[0]).backward()
        found.append((logits.detach(), [p.grad for p in made.parameters() if p.grad is not None]))
    for logits, gradients in found[1:]:
        assert torch.equal(logits, found[0][0])
        assert len(gradients) == len(found[0][1]) > 10
        assert all(torch.equal(a, b) for a, b in zip(gradients, found[0][1], strict=True))

"""One line to the plugin's attention, and back to what was there."""

from __future__ import annotations

import pytest
import torch

from rl_attn_plugin import swap_attention
from tests.integrations.transformers.models import make, native

TOKENS = torch.arange(30).view(2, 15) + 1


@pytest.mark.parametrize("name", ["llama", "gemma2-softcap-window", "gpt-oss-sinks"])
def test_swap_and_back(name: str) -> None:
    model = make(name, native(name))
    modules = list(model.modules())
    with torch.no_grad():
        before = model(TOKENS).logits
        with swap_attention(model) as handle:
            assert len(handle.replaced) == model.config.num_hidden_layers and not handle.left
            assert all(name.endswith("self_attn") for name in handle.replaced)
            inside = model(TOKENS).logits
            again = swap_attention(model)
            assert not again.replaced and set(again.left.values()) == {"it is the plugin's already"}
            again.restore()
            assert model.config._attn_implementation == "rl_attn"
        assert model.config._attn_implementation == native(name)
        assert torch.equal(model(TOKENS).logits, before)
    torch.testing.assert_close(inside, before, rtol=1e-4, atol=1e-4)
    assert list(model.modules()) == modules
    handle.restore()
    assert model.config._attn_implementation == native(name)


def test_an_exception_inside() -> None:
    model = make("llama", "sdpa")
    with pytest.raises(KeyError), swap_attention(model):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"


def test_gradients_flow_and_training_is_the_same() -> None:
    """Fifty steps with and without the swap."""
    losses = []
    for swapped in (False, True):
        model = make("llama", "sdpa").train()
        if swapped:
            swap_attention(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        torch.manual_seed(1)
        mine = []
        for _ in range(50):
            tokens = (torch.randint(128, (4, 1)) + torch.arange(20) * 5) % 128
            loss = model(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mine.append(loss.item())
        losses.append(torch.tensor(mine))
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=2e-3)
    assert losses[0][-1] < losses[0][0] / 2


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"takes a transformers or a Megatron-core model, got torch\.nn"):
        swap_attention(torch.nn.Linear(2, 2))

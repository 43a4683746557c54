"""A transformers model in the batch-invariant mode, trained: recomputation changes no bit, and rows do not meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import rl_attn_plugin


def model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=192, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, attn_implementation="rl_attn", initializer_range=0.1,
        )
    )  # fmt: skip
    return made.to(dtype).train()


def gradients(made: Any, ids: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    made(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}


# its replacement is not in transformers 5.0
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")


@pytest.fixture(autouse=True)
def registered() -> None:
    from rl_attn_plugin.integrations import transformers as plugin

    plugin.register()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_bit(dtype: torch.dtype, reentrant: bool) -> None:
    ids = torch.randint(128, (3, 41), generator=torch.Generator().manual_seed(1))
    made = model(dtype)
    with rl_attn_plugin.batch_invariant():
        plain, again = gradients(made, ids), gradients(made, ids)
        made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        checkpointed = gradients(made, ids)
    assert plain.keys() == checkpointed.keys() and len(plain) > 20
    for name, expected in plain.items():
        assert torch.equal(expected, again[name]), name
        assert torch.equal(expected, checkpointed[name]), name


def test_a_training_forward_has_the_bits_of_scoring_and_of_each_sequence_alone() -> None:
    ids = torch.randint(128, (5, 41), generator=torch.Generator().manual_seed(1))
    made = model(torch.bfloat16)
    made.gradient_checkpointing_enable({"use_reentrant": False})
    with rl_attn_plugin.batch_invariant():
        trained = made(input_ids=ids, use_cache=False).logits
        trained.float().logsumexp(-1).sum().backward()
        with torch.no_grad():
            made.eval()
            alone = torch.cat([made(input_ids=row[None], use_cache=False).logits for row in ids])
    assert torch.equal(trained.detach(), alone)

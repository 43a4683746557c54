"""Megatron's dynamic inference: its block tables and its context, with the attention that training runs."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install 'rl-attn-plugin[megatron]'")

from megatron.core.inference.contexts import dynamic_context
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import attention as megatron_attention

from rl_attn_plugin.integrations.megatron import swap_attention
from tests.integrations.megatron.models import (
    DEVICE,
    VOCABULARY,
    config,
    local_spec,
    model,
    packed,
    positions,
    qkv,
)

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window_size": (9, 0)},
        {"softmax_type": "off-by-one"},
        {"softmax_type": "learnable"},
        {"softmax_scale": 0.4},
    ],
    ids=str,
)
def test_the_call_has_the_bits_of_training(changes: dict[str, Any]) -> None:
    """Dummy blocks, requests without queries, padded tokens, a mixed step: rows equal those of the packed forward."""
    layer = model(config(**changes)).decoder.layers[0].self_attention.eval()
    lengths, new = [11, 26, 3], [1, 7, 3]
    q, k, v = qkv(sum(lengths), seed=5)
    edges = [0, 11, 37, 40]
    with torch.no_grad():
        whole = layer.core_attention(q, k, v, None, packed_seq_params=packed(*edges))
    blocks = torch.full((2, 12, 8, 2, 16), torch.nan, device=DEVICE)
    table = torch.full((5, 4), 11, dtype=torch.int32, device=DEVICE)  # 11 is the dummy
    free = iter(torch.randperm(11).tolist())
    for i, (begin, end) in enumerate(pairwise(edges)):
        for page, first in enumerate(range(begin, end, 8)):
            table[i, page] = block = next(free)
            rows = slice(first, min(first + 8, end))
            for cache, x in zip(blocks, (k, v), strict=True):
                cache[block, : rows.stop - rows.start] = x[rows]
    take = torch.cat([torch.arange(edges[i + 1] - n, edges[i + 1]) for i, n in enumerate(new)])
    padded = torch.cat((q[take], torch.full_like(q[:5], torch.nan)))  # tokens that fill up a CUDA graph
    offsets = torch.tensor(
        [0, 1, 8, 11, 11, 11], dtype=torch.int32, device=DEVICE
    )  # two requests fill up, too
    used = torch.tensor([*lengths, 0, 0], dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        out = layer.flash_decode_and_prefill(
            padded[:, None], *blocks, 16, 32, offsets, used, used, table, False
        )
    assert out.shape == (16, 1, 4, 16)
    assert torch.equal(out[:11].flatten(1), whole[take])
    assert not out[11:].any()


def context_of(made_for: TransformerConfig) -> dynamic_context.DynamicInferenceContext:
    """Room for eight requests of 64 tokens, in blocks of 16."""
    sizes: dict[str, Any] = {
        "max_sequence_length": 64,
        "block_size_tokens": 16,
        "max_requests": 8,
        "max_tokens": 128,
    }
    try:
        from megatron.core.inference.config import InferenceConfig
    except ImportError:  # before 0.17
        return dynamic_context.DynamicInferenceContext(
            params_dtype=torch.float32,
            num_layers=2,
            kv_channels=16,
            num_attention_heads=2,
            buffer_size_gb=0.01,
            **sizes,
        )
    return dynamic_context.DynamicInferenceContext(made_for, InferenceConfig(buffer_size_gb=1, **sizes))


def inference_mode() -> contextlib.AbstractContextManager[Any]:
    """From 0.17 on, Megatron's layers ask this instead of ``training``."""
    try:
        from megatron.core.inference.utils import InferenceMode
    except ImportError:
        return contextlib.nullcontext()
    return InferenceMode.active()


@pytest.mark.parametrize("changes", [{}, {"window_size": (9, 0)}, {"softmax_type": "learnable"}], ids=str)
@pytest.mark.parametrize("how", ["spec", "swap"])
def test_megatron_s_own_context_prefills_and_decodes(
    how: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real context hands out blocks and lengths; logits are those of a forward over the whole sequences."""
    pytest.importorskip("einops", reason="Megatron's dynamic inference needs einops: pip install einops")
    monkeypatch.setattr(megatron_attention, "HAVE_FA3", True)  # its guard, though nothing of it is called
    if DEVICE == "cpu":
        monkeypatch.setattr(dynamic_context, "triton_append_key_value_cache", None)
    made_for = config(**changes)
    made = model(made_for, local_spec(made_for) if how == "swap" else None).eval()
    if how == "swap":
        swap_attention(made)
    prompts = [torch.randint(VOCABULARY, (n,), device=DEVICE) for n in (21, 5, 34)]
    context = context_of(made_for)
    for i, prompt in enumerate(prompts):
        options = SamplingParams(num_tokens_to_generate=8)
        context.add_request(
            DynamicInferenceRequest(request_id=i, prompt_tokens=prompt, sampling_params=options)
        )
    sequences = list(prompts)
    with torch.inference_mode():
        for _ in range(5):
            context.initialize_attention_state()
            ids, places = context.current_input_and_position_ids()
            with inference_mode():
                logits = made(ids, places, None, inference_context=context, runtime_gather_output=True)
            for i, sequence in enumerate(sequences):
                whole = made(sequence[None], positions(1, len(sequence)), None)[0, -1]
                torch.testing.assert_close(logits[0, i], whole, rtol=1e-4, atol=1e-5)
            new = logits[0, : len(prompts)].argmax(-1)
            sequences = [torch.cat((s, n[None])) for s, n in zip(sequences, new, strict=True)]
            context.update_requests(torch.ones(len(prompts), dtype=torch.int32, device=DEVICE), new)
    assert context.is_decode_only()

"""``attn_implementation="rl_attn"`` gives each family's own numbers, for every kind of padding and cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from rl_attn_plugin.integrations.transformers import attention_implementation, register
from rl_attn_plugin.integrations.transformers.attention import rl_attn_forward
from rl_attn_plugin.integrations.transformers.masks import rl_attn_mask
from tests.integrations.transformers.models import CONFIGS, make, native

register()


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(1))


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Three rows of 21 columns with 0, 6 and 18 of them padding."""
    ids, mask = tokens(3, 21), torch.ones(3, 21, dtype=torch.int64)
    for row, count in enumerate((0, 6, 18)):
        where = slice(0, count) if side == "left" else slice(21 - count, 21)
        mask[row, where] = 0
        ids[row, where] = 0
    return ids, mask


def logits(model: PreTrainedModel, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_causal(name: str) -> None:
    """Without a registered mask a custom attention sees the future, and nothing says so."""
    model = make(name, "rl_attn")
    ids = tokens(2, 20)
    changed = ids.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 128
    assert torch.equal(logits(model, input_ids=ids)[:, :12], logits(model, input_ids=changed)[:, :12])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_logits_and_gradients_equal_the_native_ones(name: str, padding: str) -> None:
    ids, mask = (tokens(3, 21), None) if padding == "none" else padded(padding)
    real = torch.ones(3, 21).bool() if mask is None else mask.bool()
    inputs = {"input_ids": ids, "attention_mask": mask}
    if mask is not None:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    results = []
    for attention in ("rl_attn", native(name)):
        model = make(name, attention)
        out = model(**inputs).logits
        (torch.log_softmax(out, -1)[..., 5] * real).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((out.detach()[real], grads))
    torch.testing.assert_close(results[0][0], results[1][0], atol=2e-4, rtol=2e-4)
    assert results[0][1].keys() == results[1][1].keys()
    for parameter, gradient in results[0][1].items():
        torch.testing.assert_close(
            gradient, results[1][1][parameter], atol=2e-3, rtol=2e-3, msg=lambda m, p=parameter: f"{p}: {m}"
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_keeps_the_bits_of_attention(name: str) -> None:
    """Layer by layer: equal inputs give equal bits with and without padding on either side."""
    model = make(name, "rl_attn", torch.bfloat16)
    layer = model.model.layers[0].self_attn
    inside = torch.randn(1, 15, 64, generator=torch.Generator().manual_seed(2)).bfloat16()

    def run(left: int, right: int) -> Tensor:
        width = 15 + left + right
        hidden = torch.randn(2, width, 64).bfloat16()
        hidden[1, left : left + 15] = inside[0]
        mask = torch.zeros(2, width, dtype=torch.bool)
        mask[0], mask[1, left : left + 15] = True, True
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cos_sin = _embeddings(model, hidden, positions)
        table = rl_attn_mask(2, width, width, attention_mask=mask, device=torch.device("cpu"))
        with torch.no_grad():
            return _core(layer, hidden, cos_sin, table, positions)[1, left : left + 15]

    plain = run(0, 0)
    for left, right in ((5, 0), (0, 9), (3, 4), (64, 1)):
        assert torch.equal(run(left, right), plain), (left, right)


def _embeddings(model: PreTrainedModel, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    rotary = model.model.rotary_emb
    try:
        return rotary(hidden, position_ids=positions)
    except TypeError:
        return rotary(hidden, positions, layer_type="full_attention")


def _core(
    layer: torch.nn.Module,
    hidden: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    table: Tensor | None,
    positions: Tensor,
) -> Tensor:
    """The layer's attention before its output projection, whose bits depend on the number of rows."""
    caught: list[Tensor] = []
    hook = layer.o_proj.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    # the input projections' bits depend on the number of rows too: compute them row by row
    projections = [layer.q_proj, layer.k_proj, layer.v_proj]
    originals = [p.forward for p in projections]
    for projection, forward in zip(projections, originals, strict=True):
        projection.forward = lambda x, f=forward: torch.cat(
            [torch.cat([f(x[b : b + 1, s : s + 1]) for s in range(x.shape[1])], 1) for b in range(x.shape[0])]
        )
    try:
        layer(hidden_states=hidden, position_embeddings=cos_sin, attention_mask=table, position_ids=positions)
    finally:
        hook.remove()
        for projection, forward in zip(projections, originals, strict=True):
            projection.forward = forward
    return caught[0]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("explicit", [False, True], ids=["position_ids", "cu_seq_lens"])
def test_packed_equals_each_sequence_alone(name: str, explicit: bool) -> None:
    model = make(name, "rl_attn")
    lengths = [9, 1, 14]
    ids = tokens(1, sum(lengths))
    inputs = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    if explicit:
        cu = torch.tensor([0, 9, 10, 24], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 14, "max_length_k": 14}
    packed = logits(model, **inputs, use_cache=False)
    alone = [logits(model, input_ids=part) for part in ids.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_left_padding(name: str, cache: str) -> None:
    ids, mask = padded("left")
    results = []
    for attention in ("rl_attn", native(name)):
        model = make(name, attention)
        made = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            cache_implementation=cache,
            output_logits=True,
            return_dict_in_generate=True,
            disable_compile=True,
        )
        results.append((made.sequences, torch.stack(made.logits)))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], atol=5e-4, rtol=5e-4)


def test_a_mask_with_holes() -> None:
    ids = tokens(2, 16)
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 4:7] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    got, want = (logits(make("llama", a), **inputs) for a in ("rl_attn", "sdpa"))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=2e-4, rtol=2e-4)


def test_bidirectional_attention() -> None:
    results = []
    for attention in ("rl_attn", "sdpa"):
        model = make("llama", attention)
        model.config.is_causal = False
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        results.append(logits(model, input_ids=tokens(2, 12)))
    torch.testing.assert_close(*results, atol=2e-4, rtol=2e-4)


def test_gradient_checkpointing_changes_nothing() -> None:
    grads = []
    for checkpointing in (False, True):
        model = make("llama", "rl_attn").train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(input_ids=tokens(2, 15), use_cache=False).logits.square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_switching_restores_the_model_and_survives_errors() -> None:
    model = make("llama", "sdpa")
    with attention_implementation(model, "rl_attn"):
        assert model.config._attn_implementation == "rl_attn"
        with attention_implementation(model, "eager"):
            assert model.config._attn_implementation == "eager"
        assert model.config._attn_implementation == "rl_attn"
    with pytest.raises(RuntimeError, match="inside"), attention_implementation(model, "rl_attn"):
        raise RuntimeError("inside")
    assert model.config._attn_implementation == "sdpa"


def test_registering_twice_is_harmless() -> None:
    register()
    register()
    assert AttentionInterface()["rl_attn"] is rl_attn_forward
    assert ALL_MASK_ATTENTION_FUNCTIONS["rl_attn"] is rl_attn_mask


def test_what_cannot_be_honoured_is_refused() -> None:
    model = make("llama", "rl_attn").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(NotImplementedError, match=r"no dropout, got 0\.1"):
        model(input_ids=tokens(1, 4))
    model.eval()
    with pytest.raises(NotImplementedError, match=r"got a prepared mask of shape \[1, 1, 4, 4\]"):
        model(input_ids=tokens(1, 4), attention_mask=torch.zeros(1, 1, 4, 4))

    def peeks(b: int, h: int, q: Tensor, k: Tensor) -> Tensor:
        return k <= q + 1

    with pytest.raises(NotImplementedError, match="got a mask made of test_what"):
        rl_attn_mask(1, 4, 4, mask_function=peeks)

"""Megatron-core's real GPT model on a CPU with the plugin's core attention, in sbhd and thd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install 'rl-attn-plugin[megatron]'")

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from rl_attn_plugin import capture_attention_inputs
from rl_attn_plugin.integrations.megatron import CoreAttention, gpt_layer_spec, swap_attention
from rl_attn_plugin.integrations.megatron.dynamic import flash_decode_and_prefill
from rl_attn_plugin.reference import attention_reference
from rl_attn_plugin.replay import compare_attention
from rl_attn_plugin.replay.captures import load_captures

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = torch.distributed.FileStore(
        str(tmp_path_factory.mktemp("store") / "store"), 1
    )  # no port to collide on
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(0)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def config(**changes: Any) -> TransformerConfig:
    given: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 96,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True, "normalization": "RMSNorm",
        "add_bias_linear": False, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False, "masked_softmax_fusion": False,
    }  # fmt: skip
    return TransformerConfig(**{**given, **changes})


def core(**changes: Any) -> CoreAttention:
    extra = {name: changes.pop(name) for name in ("k_channels", "v_channels") if name in changes}
    return CoreAttention(config(**changes), 1, AttnMaskType.causal, "self", **extra)


def model(seed: int = 0, **changes: Any) -> GPTModel:
    torch.manual_seed(seed)
    made = GPTModel(
        config(**changes), gpt_layer_spec(normalization="RMSNorm"), vocab_size=128, max_sequence_length=256,
        position_embedding_type="learned_absolute", parallel_output=False, share_embeddings_and_output_weights=False,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    return made


class PlainCore(nn.Module):
    """What the core attention has to compute, by the oracle: nothing of the plugin's operators."""

    def __init__(self, ours: CoreAttention) -> None:
        super().__init__()
        self.config, self.window, self.scale = ours.config, ours.window, ours.softmax_scale
        self.sinks = ours.softmax_offset

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> Tensor:
        outs = [
            attention_reference(
                query[:, b],
                key[:, b],
                value[:, b],
                scale=self.scale,
                window=self.window,
                sinks=self.sinks,
                dtype=torch.float64,
            )[0]
            for b in range(query.shape[1])
        ]
        return torch.stack(outs, 1).flatten(2).to(query.dtype)


def with_plain_cores(made: GPTModel) -> GPTModel:
    for layer in made.decoder.layers:
        layer.self_attention.core_attention = PlainCore(layer.self_attention.core_attention)
    return made


def positions(batch: int, length: int) -> Tensor:
    return torch.arange(length).expand(batch, -1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window_size": (7, 0)},
        {"softmax_type": "off-by-one"},
        {"softmax_type": "learnable"},
        {"num_query_groups": 4},
    ],
    ids=str,
)
def test_logits_and_gradients_of_a_model(changes: dict[str, Any]) -> None:
    ours, plain = model(**changes), with_plain_cores(model(**changes))
    tokens = torch.randint(128, (3, 40))
    found = []
    for made in (ours, plain):
        logits = made(tokens, positions(3, 40), None)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        found.append((logits.detach(), {n: p.grad for n, p in made.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    mine = found[0][1]
    theirs = {
        name.replace("core_attention.sinks", "core_attention.softmax_offset"): g
        for name, g in found[1][1].items()
    }
    assert mine.keys() == theirs.keys() and len(mine) > 8
    for name, gradient in mine.items():
        torch.testing.assert_close(
            gradient, theirs[name], rtol=1e-3, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_packed_with_ghosts_and_an_oversized_bound() -> None:
    """thd as Megatron-RL sends it: zero-length sequences at the end, padding, a bound of the whole bin."""
    ours = core()
    torch.manual_seed(0)
    lengths = [13, 30, 1, 9]
    q, k, v = (torch.randn(64, h, 16, requires_grad=True) for h in (4, 2, 2))
    cu = torch.tensor([0, 13, 43, 44, 53, 53, 53, 64], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu, cu, max_seqlen_q=64, max_seqlen_kv=64)
    out = ours(q, k, v, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=packed)
    assert out.shape == (64, 64)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        exact, _ = attention_reference(q[rows], k[rows], v[rows])
        torch.testing.assert_close(out[rows].double(), exact.flatten(1), rtol=1e-5, atol=1e-6)
        alone = ours(
            q[rows], k[rows], v[rows], None, packed_seq_params=PackedSeqParams(
                "thd", torch.tensor([0, length]), torch.tensor([0, length]), max_seqlen_q=length, max_seqlen_kv=length
            ),
        )  # fmt: skip
        assert torch.equal(alone, out[rows])
        begin += length
    out.sum().backward()
    assert q.grad is not None and bool(q.grad.isfinite().all())


def test_padded_offsets() -> None:
    """Where sequences lie is one thing, how long they are another; what lies between is never read."""
    ours = core()
    torch.manual_seed(1)
    q, k, v = (torch.full((40, h, 16), torch.nan) for h in (4, 2, 2))
    real, padded = torch.tensor([0, 5, 16], dtype=torch.int32), torch.tensor([0, 16, 40], dtype=torch.int32)
    for begin, length in ((0, 5), (16, 11)):
        for x in (q, k, v):
            x[begin : begin + length] = torch.randn(length, *x.shape[1:])
    packed = PackedSeqParams("thd", real, real, padded, padded, max_seqlen_q=40, max_seqlen_kv=40)
    out = ours(q, k, v, None, packed_seq_params=packed)
    for begin, length in ((0, 5), (16, 11)):
        rows = slice(begin, begin + length)
        exact, _ = attention_reference(q[rows], k[rows], v[rows])
        torch.testing.assert_close(out[rows].double(), exact.flatten(1), rtol=1e-5, atol=1e-6)
    assert not out[5:16].any() and not out[27:].any()


def test_masks_of_padding() -> None:
    ours = core()
    torch.manual_seed(2)
    q, k, v = (torch.randn(12, 2, h, 16) for h in (4, 2, 2))
    masked_out = torch.arange(12)[None] >= torch.tensor([[12], [7]])
    for kind, causal in ((AttnMaskType.padding, False), (AttnMaskType.padding_causal, True)):
        out = ours(q, k, v, masked_out[:, None, None], attn_mask_type=kind)
        for b, length in enumerate((12, 7)):
            exact, _ = attention_reference(q[:length, b], k[:length, b], v[:length, b], causal=causal)
            torch.testing.assert_close(out[:length, b].double(), exact.flatten(1), rtol=1e-5, atol=1e-6)
    everything = ours(q, k, v, None, attn_mask_type=AttnMaskType.no_mask)
    exact, _ = attention_reference(q[:, 1], k[:, 1], v[:, 1], causal=False)
    torch.testing.assert_close(everything[:, 1].double(), exact.flatten(1), rtol=1e-5, atol=1e-6)


def test_other_head_dims_and_scales() -> None:
    """As multi-head latent attention builds it."""
    ours = core(k_channels=24, v_channels=16, num_query_groups=4)
    torch.manual_seed(3)
    q, k = (torch.randn(9, 2, 4, 24) for _ in range(2))
    v = torch.randn(9, 2, 4, 16)
    out = ours(q, k, v, None)
    exact, _ = attention_reference(q[:, 0], k[:, 0], v[:, 0], scale=24**-0.5)
    assert out.shape == (9, 2, 64)
    torch.testing.assert_close(out[:, 0].double(), exact.flatten(1), rtol=1e-5, atol=1e-6)
    scaled = core(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True)
    assert scaled.softmax_scale == 16**-0.5


def test_largest_logits_for_clipping() -> None:
    ours = core(qk_clip=True)
    torch.manual_seed(4)
    q, k, v = (torch.randn(20, 1, h, 16) for h in (4, 2, 2))
    ours(q, k, v, None)
    scores = torch.einsum("qhd,khd->hqk", q[:, 0], k[:, 0].repeat_interleave(2, 1)) / 4
    scores = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(ours.current_max_attn_logits, scores.amax((1, 2)))
    before = ours.current_max_attn_logits
    ours(q * 0.1, k, v, None)
    assert torch.equal(ours.current_max_attn_logits, before)  # the largest since it was cleared


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout must be 0 (--attention-dropout 0), got 0.1"),
        ({"context_parallel_size": 2}, "context_parallel_size must be 1"),
        ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention must be off"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        core(**changes)
    assert message in str(error.value)


def test_calls_that_are_refused() -> None:
    ours = core()
    q, k, v = (torch.randn(4, 1, h, 16) for h in (4, 2, 2))
    with pytest.raises(NotImplementedError, match="attention bias"):
        ours(q, k, v, None, attention_bias=torch.zeros(1, 4, 4, 4))
    with pytest.raises(NotImplementedError, match="no arbitrary mask"):
        ours(q, k, v, torch.zeros(1, 1, 4, 4).bool(), attn_mask_type=AttnMaskType.arbitrary)
    with pytest.raises(NotImplementedError, match=r"padding mask must be bool \[1, 1, 1, 4\]"):
        ours(q, k, v, torch.zeros(1, 1, 4, 4).bool(), attn_mask_type=AttnMaskType.padding)


class DotProductAttention(PlainCore):
    """Bears the name of Megatron's own, whose forward needs a GPU."""

    def __init__(self, ours: CoreAttention) -> None:
        super().__init__(ours)
        self.layer_number, self.attn_mask_type = ours.layer_number, ours.attn_mask_type
        self.pg_collection, self.softmax_offset = ours.pg_collection, ours.softmax_offset


def test_swap_and_back() -> None:
    made = model(softmax_type="learnable")
    for layer in made.decoder.layers:
        layer.self_attention.core_attention = DotProductAttention(layer.self_attention.core_attention)
    made.decoder.layers[1].self_attention.core_attention.config = config(
        attention_dropout=0.5, softmax_type="learnable"
    )
    theirs = [layer.self_attention.core_attention for layer in made.decoder.layers]
    tokens = torch.randint(128, (2, 20))
    before = made(tokens, positions(2, 20), None)
    with swap_attention(made) as handle:
        assert handle.replaced == ["decoder.layers.0.self_attention.core_attention"]
        (reason,) = handle.left.values()
        assert "attention_dropout must be 0" in reason and "1 replaced" in str(handle)
        ours = made.decoder.layers[0].self_attention.core_attention
        assert isinstance(ours, CoreAttention) and ours.softmax_offset is theirs[0].softmax_offset
        assert (
            made.decoder.layers[0].self_attention.flash_decode_and_prefill.__func__
            is flash_decode_and_prefill
        )
        inside = made(tokens, positions(2, 20), None)
        torch.testing.assert_close(inside, before, rtol=1e-4, atol=1e-5)
        again = swap_attention(made)
        assert (
            not again.replaced and "already" in again.left["decoder.layers.0.self_attention.core_attention"]
        )
        again.restore()
        assert made.decoder.layers[0].self_attention.core_attention is ours
    assert [layer.self_attention.core_attention for layer in made.decoder.layers] == theirs
    assert "flash_decode_and_prefill" not in vars(made.decoder.layers[0].self_attention)
    assert torch.equal(made(tokens, positions(2, 20), None), before)
    handle.restore()  # again: nothing happens


def test_the_inference_engine_s_call_has_the_bits_of_training() -> None:
    """Blocks with a dummy page, requests without queries, a mixed step: rows equal those of the packed forward."""
    layer = model(window_size=(9, 0)).decoder.layers[0].self_attention.eval()
    torch.manual_seed(5)
    lengths, new = [11, 26, 3], [1, 7, 3]
    q, k, v = (torch.randn(sum(lengths), h, 16) for h in (4, 2, 2))
    cu = torch.tensor([0, 11, 37, 40], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu, cu, max_seqlen_q=26, max_seqlen_kv=26)
    whole = layer.core_attention(q, k, v, None, packed_seq_params=packed)
    blocks = torch.full((2, 12, 8, 2, 16), torch.nan)
    table = torch.full((5, 4), 11, dtype=torch.int32)  # 11 is the dummy
    free = iter(torch.randperm(11).tolist())
    for i, length in enumerate(lengths):
        for page in range(-(-length // 8)):
            table[i, page] = next(free)
            rows = slice(int(cu[i]) + 8 * page, min(int(cu[i]) + 8 * page + 8, int(cu[i + 1])))
            for cache, x in zip(blocks, (k, v), strict=True):
                cache[table[i, page], : rows.stop - rows.start] = x[rows]
    take = torch.cat([torch.arange(int(cu[i + 1]) - n, int(cu[i + 1])) for i, n in enumerate(new)])
    offsets = torch.tensor(
        [0, 1, 8, 11, 11, 11], dtype=torch.int32
    )  # two requests are only there for a graph
    used = torch.tensor([*lengths, 0, 0], dtype=torch.int32)
    out = flash_decode_and_prefill(
        layer, q[take][:, None], *blocks, 16, 32, offsets, used, used, table, False, softmax_offset=None
    )
    assert out.shape == (11, 1, 4, 16)
    assert torch.equal(out.flatten(1), whole[take])


def test_training_has_the_same_losses() -> None:
    """Fifty steps with the plugin's attention and with the oracle's."""
    losses = []
    for plain in (False, True):
        made = model(seed=3)
        if plain:
            with_plain_cores(made)
        optimizer = torch.optim.AdamW(made.parameters(), lr=2e-3)
        torch.manual_seed(7)
        mine = []
        for _ in range(50):
            start = torch.randint(128, (4, 1))
            tokens = (start + torch.arange(24) * 3) % 128
            logits = made(tokens, positions(4, 24), None)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mine.append(loss.item())
        losses.append(mine)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=2e-3, atol=2e-3)
    assert losses[0][-1] < losses[0][0] / 2


def test_selective_recompute_changes_nothing() -> None:
    tokens = torch.randint(128, (2, 16))
    found = []
    for changes in ({}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}):
        made = model(**changes).train()
        assert made.decoder.layers[0].self_attention.checkpoint_core_attention == bool(changes)
        try:
            logits = made(tokens, positions(2, 16), None)
        except (
            RuntimeError,
            AssertionError,
        ) as reason:  # Megatron's checkpoint keeps the state of CUDA generators
            if torch.cuda.is_available():
                raise
            pytest.skip(f"Megatron's checkpoint needs a GPU: {str(reason).splitlines()[0][:80]}")
        logits.sum().backward()
        found.append([p.grad.clone() for p in made.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_captured_layers_go_through_every_path(tmp_path: Path) -> None:
    made = model(window_size=(9, 0), softmax_type="learnable")
    tokens = torch.randint(128, (2, 33))
    outputs: dict[int, Tensor] = {}
    for n, layer in enumerate(made.decoder.layers):
        layer.self_attention.core_attention.register_forward_hook(
            lambda module, given, out, n=n: outputs.__setitem__(n, out)
        )
    found = capture_attention_inputs(made, tokens, layers=[0, -1], folder=tmp_path)
    assert list(found) == list(load_captures(tmp_path)) == ["layer-00", "layer-01"]
    for n, (label, inputs) in enumerate(found.items()):
        report = compare_attention(inputs, kv_page_size=8, include_peers=False, impl="torch", label=label)
        assert report.verdict == "PASS", report.reasons
        for b in range(2):
            exact, _ = attention_reference(
                inputs.q[b],
                inputs.k[b],
                inputs.v[b],
                scale=inputs.scale,
                window=inputs.window,
                sinks=inputs.sinks,
            )
            torch.testing.assert_close(outputs[n][:, b].double(), exact.flatten(1), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"layers must be -2 to 1, got \[2\]"):
        capture_attention_inputs(made, tokens, layers=[2])
    with pytest.raises(ValueError, match=r"at least one token, got \[2, 0\]"):
        capture_attention_inputs(made, tokens[:, :0])


def test_state_dicts_are_megatrons() -> None:
    made = model(softmax_type="learnable")
    state = made.state_dict()
    name = "decoder.layers.0.self_attention.core_attention.softmax_offset"
    assert state[name].shape == (4,)
    other = model(seed=9, softmax_type="learnable")
    other.load_state_dict(state)
    tokens = torch.randint(128, (1, 9))
    assert torch.equal(made(tokens, positions(1, 9), None), other(tokens, positions(1, 9), None))
    assert not [n for n in model().state_dict() if "core_attention" in n and "_extra_state" not in n]

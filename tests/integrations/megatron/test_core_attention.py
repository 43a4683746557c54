"""The core attention by itself: packed sequences, masks, head dims, what it refuses, what a checkpoint holds."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install 'rl-attn-plugin[megatron]'")

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from rl_attn_plugin.integrations.megatron import CoreAttention
from rl_attn_plugin.reference import attention_reference
from tests.integrations.megatron.models import DEVICE, config, core, local_spec, model, packed, positions, qkv

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("default")]


def assert_rows(rows: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """One sequence against the oracle."""
    exact, _ = attention_reference(q, k, v, **options)
    torch.testing.assert_close(rows.double(), exact.flatten(1), rtol=1e-5, atol=1e-6)


def test_packed_with_ghosts_and_an_oversized_bound() -> None:
    """thd as Megatron-RL sends it: zero-length sequences at the end, then padding, a bound of the whole bin."""
    ours = core()
    q, k, v = (x.requires_grad_() for x in qkv(64))
    edges = (0, 13, 43, 44, 53, 53, 53, 64)
    sequences = packed(*edges, longest=4096)
    out = ours(q, k, v, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=sequences)
    assert out.shape == (64, 64)
    for begin, end in pairwise(edges):
        rows = slice(begin, end)
        assert_rows(out[rows], q[rows], k[rows], v[rows])
        alone = ours(q[rows], k[rows], v[rows], None, packed_seq_params=packed(0, end - begin))
        assert torch.equal(alone, out[rows])  # bits do not depend on neighbours
    out.square().sum().backward()
    grads = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    for begin, end in pairwise(edges):
        attention_reference(q[begin:end], k[begin:end], v[begin:end])[0].square().sum().backward()
    for found, x in zip(grads, (q, k, v), strict=True):
        torch.testing.assert_close(found, x.grad, rtol=1e-4, atol=1e-5)


def test_nothing_is_fetched_from_the_device() -> None:
    """Meta tensors have no values at all: reading a length or a bound would raise."""
    ours = core(qk_clip=True).to("meta")
    q, k, v = (x.to("meta") for x in qkv(64))
    cu = torch.empty(9, dtype=torch.int32, device="meta")
    for bound in (64, None, torch.empty((), dtype=torch.int32, device="meta")):
        for at in (None, cu):
            sequences = PackedSeqParams("thd", cu, cu, at, at, max_seqlen_q=bound, max_seqlen_kv=bound)
            assert ours(q, k, v, None, packed_seq_params=sequences).shape == (64, 64)
    with pytest.raises(RuntimeError, match="meta tensors"):
        int(torch.empty((), device="meta"))


def test_a_bound_that_lies_on_the_device_is_not_needed() -> None:
    ours = core()
    q, k, v = qkv(40)
    known, unknown = packed(0, 17, 40), packed(0, 17, 40)
    unknown.max_seqlen_q = unknown.max_seqlen_kv = torch.tensor(23)
    out = [ours(q, k, v, None, packed_seq_params=sequences) for sequences in (known, unknown)]
    assert torch.equal(*out)


def test_padded_offsets() -> None:
    """Where sequences lie is one thing, how long they are another; what lies between is never read."""
    ours = core()
    q, k, v = (torch.full_like(x, torch.nan) for x in qkv(40))
    given = qkv(16)
    for begin, take in ((0, slice(0, 5)), (16, slice(5, 16))):
        for x, real in zip((q, k, v), given, strict=True):
            x[begin : begin + take.stop - take.start] = real[take]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ours(*leaves, None, packed_seq_params=packed(0, 5, 16, padded=(0, 16, 40), longest=24))
    for begin, length in ((0, 5), (16, 11)):
        rows = slice(begin, begin + length)
        assert_rows(out[rows], q[rows], k[rows], v[rows])
    assert not out[5:16].any() and not out[27:].any()
    out.sum().backward()
    for x in leaves:
        assert bool(x.grad.isfinite().all()) and not x.grad[5:16].any() and not x.grad[27:].any()


@pytest.mark.parametrize("kind", ["no_mask", "padding", "causal", "padding_causal", "causal_bottom_right"])
def test_mask_types_of_packed_sequences(kind: str) -> None:
    ours = core(AttnMaskType.arbitrary)  # what a call says wins
    q, k, v = qkv(30)
    out = ours(q, k, v, None, attn_mask_type=AttnMaskType[kind], packed_seq_params=packed(0, 12, 30))
    for rows in (slice(0, 12), slice(12, 30)):
        assert_rows(out[rows], q[rows], k[rows], v[rows], causal="causal" in kind)


@pytest.mark.parametrize("side", ["left", "right", "both", "holes"])
@pytest.mark.parametrize("kind", ["padding", "padding_causal"])
def test_masks_of_padding(kind: str, side: str) -> None:
    ours = core(AttnMaskType[kind])  # and where it says nothing, the module's type counts
    q, k, v = qkv(12, 2)
    keep = torch.ones(2, 12, dtype=torch.bool)
    for hidden in {"left": [0, 1, 2], "right": [9, 10, 11], "both": [0, 11], "holes": [1, 4, 5]}[side]:
        keep[1, hidden] = False
    keep = keep.to(DEVICE)
    out = ours(q, k, v, ~keep[:, None, None])
    for b in range(2):
        exact, _ = attention_reference(q[:, b], k[:, b], v[:, b], causal="causal" in kind, keep=keep[b])
        torch.testing.assert_close(out[keep[b], b].double(), exact.flatten(1)[keep[b]], rtol=1e-5, atol=1e-6)
    everything = ours(q, k, v, torch.zeros(2, 1, 1, 12, dtype=torch.bool, device=DEVICE))
    assert torch.equal(everything, ours(q, k, v, None))


@pytest.mark.parametrize("window", [(-1, -1), (4, 0), (0, 0), (4, 2)])
@pytest.mark.parametrize("kind", ["no_mask", "causal"])
def test_windows_of_decoding(kind: str, window: tuple[int, int]) -> None:
    """Fewer queries than keys, as static inference calls it: aligned bottom-right."""
    ours = core(window_size=None if window == (-1, -1) else window)
    q, k, v = qkv(20, 2)
    out = ours(q[-3:], k, v, None, attn_mask_type=AttnMaskType[kind])
    for b in range(2):
        assert_rows(out[:, b], q[-3:, b], k[:, b], v[:, b], causal=kind == "causal", window=window)


def test_windows_skip_layers() -> None:
    given = config(window_size=(4, 0), window_attn_skip_freq=3)
    windows = [CoreAttention(given, n, AttnMaskType.causal, "self").window for n in (1, 2, 3, 4)]
    assert windows == [(4, 0), (4, 0), (-1, -1), (4, 0)]


def test_other_head_dims_and_scales() -> None:
    """As multi-head latent attention builds it."""
    ours = core(k_channels=24, v_channels=16, num_query_groups=4)
    q, k, v = qkv(9, 2, dim=24, groups=4)
    out = ours(q, k, v, None)
    assert out.shape == (9, 2, 64)
    assert_rows(out[:, 0], q[:, 0], k[:, 0], v[:, 0], scale=24**-0.5)
    assert core(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True).softmax_scale == 16**-0.5
    assert core(softmax_scale=0.3).softmax_scale == 0.3


@pytest.mark.parametrize("option", ["qk_clip", "log_max_attention_logit"])
def test_largest_logits_for_clipping(option: str) -> None:
    ours = core(**{option: True})
    q, k, v = qkv(20, 1)
    ours(q, k, v, None)
    scores = torch.einsum("qhd,khd->hqk", q[:, 0], k[:, 0].repeat_interleave(2, 1)) / 4
    scores = scores.masked_fill(torch.ones(20, 20, device=DEVICE).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(ours.current_max_attn_logits, scores.amax((1, 2)))
    before = ours.current_max_attn_logits
    ours(q * 0.1, k, v, None)
    assert torch.equal(ours.current_max_attn_logits, before)  # the largest since it was cleared
    assert core().current_max_attn_logits is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_parallel_size": 2}, "context_parallel_size must be 1 (--context-parallel-size 1), got 2"),
        ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention must be off, got True"),
        ({"fp8_multi_head_attention": True}, "fp8_multi_head_attention must be off, got True"),
        ({"softmax_type": "hard"}, "softmax_type must be 'vanilla', 'off-by-one' or 'learnable', got 'hard'"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        core(**changes)
    assert str(error.value) == f"CoreAttention: {message}"


def test_dropout_is_refused_in_training_alone() -> None:
    q, k, v = qkv(4, 1)
    for ours in (
        core(attention_dropout=0.1),
        CoreAttention(config(attention_dropout=0.1), 1, AttnMaskType.causal, "self"),
    ):
        with pytest.raises(ValueError, match=r"must be 0 in training \(--attention-dropout 0\), got 0.1"):
            ours.train()(q, k, v, None)
        assert torch.equal(ours.eval()(q, k, v, None), core()(q, k, v, None))


class TwoRanks:
    """The size of a context-parallel group, all that is asked of one."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_bias": torch.zeros(1, 4, 4, 4)}, "adds no attention bias, got one"),
        ({"attn_mask_type": AttnMaskType.arbitrary}, "takes no arbitrary mask"),
        (
            {"attn_mask_type": AttnMaskType.arbitrary, "packed_seq_params": PackedSeqParams("thd")},
            "takes no arbitrary mask",
        ),
        ({"packed_seq_params": PackedSeqParams("bshd")}, "qkv_format must be 'thd', got 'bshd'"),
        ({"packed_seq_params": PackedSeqParams("thd", local_cp_size=2)}, "one context-parallel rank, got 2"),
        (
            {"packed_seq_params": PackedSeqParams("thd", cp_group=TwoRanks())},
            "one context-parallel rank, got 2",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else ",".join(value),
)
def test_calls_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError) as error:
        core()(*qkv(4, 1), None, **options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (torch.zeros(1, 1, 4, 4).bool(), "torch.bool [1, 1, 4, 4]"),
        (torch.zeros(1, 1, 1, 4), "torch.float32 [1, 1, 1, 4]"),
        ((torch.zeros(1, 1, 1, 4).bool(),) * 2, "tuple"),
    ],
    ids=["square", "float", "two"],
)
def test_masks_that_are_refused(mask: Any, got: str) -> None:
    with pytest.raises(NotImplementedError) as error:
        core(AttnMaskType.padding)(*qkv(4, 1), mask)
    assert str(error.value) == f"a padding mask must be bool [1, 1, 1, 4], True = masked out, got {got}"


def theirs(softmax_type: str) -> DotProductAttention:
    return DotProductAttention(config(softmax_type=softmax_type), 1, AttnMaskType.causal, "self")


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_state_dicts_are_megatron_s(softmax_type: str) -> None:
    ours, other = core(softmax_type=softmax_type), theirs(softmax_type)
    assert list(ours.state_dict()) == list(other.state_dict())
    if softmax_type == "learnable":
        nn.init.normal_(other.softmax_offset)
    ours.load_state_dict({**other.state_dict(), "_extra_state": None})  # TransformerEngine's has one
    if softmax_type == "learnable":
        assert torch.equal(ours.softmax_offset, other.softmax_offset)
        assert ours.softmax_offset.tensor_model_parallel and ours.softmax_offset.partition_dim == 0
    other.load_state_dict(ours.state_dict())
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    mine, wanted = (x.sharded_state_dict("layer.", (), metadata) for x in (ours, other))
    assert mine.keys() == wanted.keys() and len(mine) == (softmax_type == "learnable")
    for name, shard in mine.items():
        for field in (
            "key",
            "global_shape",
            "local_shape",
            "global_offset",
            "axis_fragmentations",
            "replica_id",
            "dtype",
        ):
            assert getattr(shard, field) == getattr(wanted[name], field), field


def test_a_checkpoint_of_megatron_s_own_comes_back(tmp_path: Path) -> None:
    made_for = config(softmax_type="learnable")
    made, other = model(made_for, local_spec(made_for)), model(made_for, seed=9)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    written, wanted = (x.sharded_state_dict(metadata=metadata) for x in (made, other))
    assert {key: shard.key for key, shard in written.items()} == {
        key: shard.key for key, shard in wanted.items()
    }
    torch.save(made.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    ids = torch.arange(9, device=DEVICE)[None]
    logits = [x(ids, positions(1, 9), None) for x in (made, other)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    name = "decoder.layers.1.self_attention.core_attention.softmax_offset"
    assert torch.equal(made.state_dict()[name], other.state_dict()[name])


def test_a_constant_offset_follows_the_module() -> None:
    ours = core(softmax_type="off-by-one")
    assert not ours.state_dict() and not list(ours.parameters())
    assert ours.to("meta").softmax_offset.device.type == "meta"

"""TransformerEngine's meaning of every mask, format, window and softmax, against attention written plainly."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_attn_plugin.integrations.transformer_engine import DotProductAttention
from tests.integrations.transformer_engine.oracle import (
    MASKS,
    SOFTMAX,
    attend,
    batched,
    offsets,
    padding_masks,
)

HEADS, GROUPS, DIM, V_DIM = 4, 2, 16, 24
# A module starts on the GPU where there is one, as TransformerEngine's does; these tests are about meaning.
pytestmark = pytest.mark.filterwarnings("error")


def module(**options: Any) -> DotProductAttention:
    made = DotProductAttention(HEADS, (DIM, V_DIM), GROUPS, return_lse=True, **options).cpu()
    if isinstance(made.softmax_offset, nn.Parameter):
        nn.init.normal_(made.softmax_offset)
    return made


def inputs(sq: list[int], sk: list[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    torch.manual_seed(sum(sq))
    q = [torch.randn(n, HEADS, DIM) for n in sq]
    return q, [torch.randn(n, GROUPS, DIM) for n in sk], [torch.randn(n, GROUPS, V_DIM) for n in sk]


def check(out: Tensor, lse: Tensor, wanted: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(out.double(), wanted[0].flatten(1), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-5, atol=2e-6)


# Those that TransformerEngine takes; (-1, -1) and (-1, 0) are none, and a causal mask clamps the right.
WINDOWS = [None, (-1, -1), (-1, 0), (5, 0), (0, 0), (3, 4)]


@pytest.mark.parametrize("softmax", SOFTMAX)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_batches(layout: str, mask: str, window: tuple[int, int] | None, softmax: str) -> None:
    padded = "padding" in mask
    sq, sk = ([9, 13, 4], [17, 13, 20]) if padded else ([13] * 3, [20] * 3)
    q, k, v = inputs(sq, sk)
    made = module(qkv_format=layout, attn_mask_type=mask, window_size=window, softmax_type=softmax)
    ways: list[tuple[str, dict[str, Any]]] = [("right", {})]
    if padded:
        ways = [("right", {"cu_seqlens_q": offsets(sq), "cu_seqlens_kv": offsets(sk)})]
        ways += [
            (s, {"attention_mask": (padding_masks(sq, 13, s), padding_masks(sk, 20, s))})
            for s in ("right", "left")
        ]
    for side, way in ways:
        given = [batched(x, n, side) for x, n in ((q, 13), (k, 20), (v, 20))]
        if layout == "sbhd":
            given = [x.transpose(0, 1).contiguous() for x in given]
        out, lse = made(*given, **way)
        assert out.shape == ((13, 3, HEADS * V_DIM) if layout == "sbhd" else (3, 13, HEADS * V_DIM))
        assert lse.shape == (3, HEADS, 13) and lse.dtype == torch.float32
        out = out.transpose(0, 1) if layout == "sbhd" else out
        for b, n in enumerate(sq):
            real = torch.zeros(13, dtype=torch.bool)
            real[slice(0, n) if side == "right" else slice(13 - n, 13)] = True
            check(out[b, real], lse[b][:, real], attend(q[b], k[b], v[b], mask, window, made.softmax_offset))
            assert not out[b, ~real].any() and bool(torch.isneginf(lse[b][:, ~real]).all())


@pytest.mark.parametrize("softmax", SOFTMAX)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("mask", [m for m in MASKS if "padding" in m])
@pytest.mark.parametrize("between", [False, True], ids=["dense", "padded"])
def test_packed(between: bool, mask: str, window: tuple[int, int] | None, softmax: str) -> None:
    sq, sk = [9, 0, 13, 4], [17, 5, 13, 20]
    q, k, v = inputs(sq, sk)
    made = module(qkv_format="thd", attn_mask_type=mask, window_size=window, softmax_type=softmax)
    room = [[-(-n // 8) * 8 for n in lengths] if between else lengths for lengths in (sq, sk)]
    places = [offsets(lengths) for lengths in room]
    given = []
    for parts, at in ((q, places[0]), (k, places[1]), (v, places[1])):
        x = torch.full(
            (int(at[-1]) + 3, *parts[0].shape[1:]), torch.nan
        )  # and three tokens that belong to nobody
        for part, begin in zip(parts, at.tolist(), strict=False):
            x[begin : begin + part.shape[0]] = part
        given.append(x)
    more = {"cu_seqlens_q_padded": places[0], "cu_seqlens_kv_padded": places[1], "pad_between_seqs": True}
    out, lse = made(
        *given, cu_seqlens_q=offsets(sq), cu_seqlens_kv=offsets(sk), max_seqlen_q=64, max_seqlen_kv=64,
        **(more if between else {}),
    )  # fmt: skip
    assert out.shape == (len(given[0]), HEADS * V_DIM) and lse.shape == (HEADS, len(given[0]))
    for b, (begin, end) in enumerate(pairwise([*places[0].tolist()])):
        rows = slice(begin, begin + sq[b])
        check(out[rows], lse[:, rows], attend(q[b], k[b], v[b], mask, window, made.softmax_offset))
        assert not out[rows.stop : end].any()
    assert not out[-3:].any() and bool(torch.isneginf(lse[:, -3:]).all())


@pytest.mark.parametrize("mask", MASKS)
def test_the_diagonal_of_windows_can_be_told(mask: str) -> None:
    """Of masks that are not causal: those say it themselves."""
    q, k, v = inputs([7], [12])
    more = {"cu_seqlens_q": offsets([7]), "cu_seqlens_kv": offsets([12])}
    for right in (False, True):
        for own, call in (({"bottom_right_diagonal": right}, {}), ({}, {"bottom_right_diagonal": right})):
            made = module(qkv_format="bshd", attn_mask_type=mask, window_size=(4, 3), **own)
            out, lse = made(q[0][None], k[0][None], v[0][None], **more, **call)
            check(out[0], lse[0], attend(q[0], k[0], v[0], mask, (4, 3), bottom_right=right))


@pytest.mark.parametrize("spelling", ["padding,causal", "causal,padding", "causal_padding"])
def test_other_spellings(spelling: str) -> None:
    q, k, v = inputs([6], [9])
    out, lse = module(qkv_format="thd")(
        q[0], k[0], v[0], attn_mask_type=spelling, cu_seqlens_q=offsets([6]), cu_seqlens_kv=offsets([9])
    )
    check(out, lse, attend(q[0], k[0], v[0], "padding_causal"))


def test_arguments_of_a_call_win() -> None:
    q, k, v = inputs([6], [6])
    made = module(qkv_format="sbhd", attn_mask_type="causal")
    out, lse = made(
        q[0][None], k[0][None], v[0][None], qkv_format="bshd", attn_mask_type="no_mask", window_size=(1, 1)
    )
    check(out[0], lse[0], attend(q[0], k[0], v[0], "no_mask", (1, 1)))


def test_one_mask_serves_self_attention() -> None:
    q, k, v = inputs([6, 4], [6, 4])
    made = module(qkv_format="bshd", attn_mask_type="padding")
    given = [batched(x, 6) for x in (q, k, v)]
    hidden = padding_masks([6, 4], 6)
    for one, two in zip(made(*given, hidden), made(*given, (hidden, hidden)), strict=True):
        assert torch.equal(one, two)


def test_scale_and_tensor_parallel_heads() -> None:
    q, k, v = inputs([6], [6])
    made = DotProductAttention(
        8, (DIM, V_DIM), 4, qkv_format="bshd", tp_size=2, softmax_scale=0.5, return_lse=True
    )
    out, lse = made(q[0][None], k[0][None], v[0][None])
    check(out[0], lse[0], attend(q[0], k[0], v[0], "causal", scale=0.5))


def test_largest_logits_and_plain_output() -> None:
    q, k, v = inputs([8], [8])
    given = [x[0][None] for x in (q, k, v)]
    out, largest = DotProductAttention(HEADS, (DIM, V_DIM), GROUPS, qkv_format="bshd", return_max_logit=True)(
        *given
    )
    scores = torch.einsum("ihd,jhd->hij", q[0], k[0].repeat_interleave(2, 1)) * DIM**-0.5
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(largest, scores.amax((1, 2)))
    alone = DotProductAttention(HEADS, (DIM, V_DIM), GROUPS, qkv_format="bshd")(*given)
    assert isinstance(alone, Tensor) and torch.equal(alone, out)
    both = module(qkv_format="bshd", return_max_logit=True)(*given)
    assert len(both) == 3 and torch.equal(both[1], largest) and both[2].shape == (1, HEADS, 8)


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_and_checkpointing(mask: str) -> None:
    q, k, v = inputs([11], [14])
    made = module(qkv_format="bshd", attn_mask_type=mask, softmax_type="learnable", window_size=(4, 3))
    more = {"cu_seqlens_q": offsets([11]), "cu_seqlens_kv": offsets([14])}
    found = []
    for again in (False, True):
        leaves = [x[0][None].clone().requires_grad_() for x in (q, k, v)]
        out, lse = made(*leaves, checkpoint_core_attention=again, **more)
        found.append(torch.autograd.grad(out.square().sum() + lse.sum(), (*leaves, made.softmax_offset)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    exact = [x[0].double().requires_grad_() for x in (q, k, v)]
    sinks = made.softmax_offset.detach().double().requires_grad_()
    out, lse = attend(*exact, mask, (4, 3), sinks)
    wanted = torch.autograd.grad(out.square().sum() + lse.sum(), (*exact, sinks))
    for got, right in zip(found[0], wanted, strict=True):
        torch.testing.assert_close(got.double().view(right.shape), right, rtol=1e-4, atol=1e-5)


def test_nothing_is_fetched_from_the_device() -> None:
    """Meta tensors have no values at all: reading a length, a mask or a bound would raise."""
    made = module(softmax_type="learnable", return_max_logit=True).to("meta")
    q, k, v = (
        torch.empty(12, h, d, device="meta") for h, d in ((HEADS, DIM), (GROUPS, DIM), (GROUPS, V_DIM))
    )
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    for longest in (None, 64, torch.empty((), dtype=torch.int32, device="meta")):
        made(
            q, k, v, None, "thd", cu, cu, cu, cu, longest, longest, attn_mask_type="padding_causal"
        )  # fmt: skip
    dense = [x[None] for x in (q, k, v)]
    made(*dense, None, "bshd", cu[:2], cu[:2], attn_mask_type="padding")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qkv_format": "hbsd"}, "qkv_format must be one of ['sbhd', 'bshd', 'thd'], got 'hbsd'"),
        ({"attn_mask_type": "arbitrary"}, f"attn_mask_type must be one of {MASKS}, got 'arbitrary'"),
        ({"softmax_type": "hard"}, f"softmax_type must be one of {SOFTMAX}, got 'hard'"),
        ({"tp_size": 3}, "must be multiples of tp_size, got 4, 2 and 3"),
        ({"window_size": (-1, 2)}, "(-1, 0) or not negative with 'causal', got (-1, 2)"),
        ({"cp_group": "g"}, "cp_group must be None: there is no context parallelism, got g"),
        ({"cp_global_ranks": [0]}, "cp_global_ranks must be None: there is no context parallelism, got [0]"),
        ({"cp_stream": "s"}, "cp_stream must be None: there is no context parallelism, got s"),
        ({"flavour": 1}, "there are no arguments ['flavour']"),
    ],
    ids=str,
)
def test_what_the_constructor_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        module(**options)
    assert message in str(error.value)


def test_a_context_parallel_group_set_later_is_refused() -> None:
    module().set_context_parallel_group(None, [], None, "p2p")
    with pytest.raises(ValueError, match="cp_group must be None: there is no context parallelism, got g"):
        module().set_context_parallel_group("g", [0, 1], None)


SIX = padding_masks([6], 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"core_attention_bias_type": "alibi"}, "core_attention_bias_type must be 'no_bias'"),
        ({"core_attention_bias_type": "post_scale_bias"}, "and core_attention_bias None, got 'post_scale_bias' and None"),
        ({"core_attention_bias_type": "pre_scale_bias"}, "must be 'no_bias'"),
        ({"core_attention_bias": torch.zeros(1)}, "core_attention_bias None, got 'no_bias' and a tensor"),
        ({"alibi_slopes": torch.zeros(4)}, "alibi_slopes cannot be honoured: leave it out"),
        ({"inference_params": object()}, "inference_params cannot be honoured"),
        ({"fp8_output": True}, "fp8_output cannot be honoured"),
        ({"bf16_backward": True}, "bf16_backward cannot be honoured"),
        ({"score_mod": len}, "score_mod cannot be honoured"),
        ({"qkv_layer": torch.zeros(1)}, "qkv_layer cannot be honoured"),
        ({"attn_mask_type": "arbitrary"}, "attn_mask_type must be one of"),
        ({"window_size": (-1, 2), "attn_mask_type": "no_mask"}, "not negative with 'no_mask', got (-1, 2)"),
        ({"qkv_format": "thd"}, "query_layer must have 3 dims with thd and end in [4, 16], got [1, 6, 4, 16]"),
        ({"attn_mask_type": "padding"}, "by cu_seqlens_q and cu_seqlens_kv or by attention_mask, got neither"),
        ({"attn_mask_type": "padding", "attention_mask": SIX.float()}, "True = masked out, got torch.float32"),
        ({"attn_mask_type": "padding", "attention_mask": SIX[..., :5]}, "got torch.bool [1, 1, 1, 5]: give two"),
    ],
    ids=lambda value: None if isinstance(value, str) else ",".join(value),
)  # fmt: skip
def test_what_a_call_refuses(options: dict[str, Any], message: str) -> None:
    q, k, v = inputs([6], [6])
    with pytest.raises(ValueError) as error:
        module(qkv_format="bshd")(q[0][None], k[0][None], v[0][None], **options)
    assert message in str(error.value)


def test_packed_needs_offsets_and_padding() -> None:
    q, k, v = inputs([6], [6])
    with pytest.raises(ValueError) as error:
        module(qkv_format="thd")(q[0], k[0], v[0], cu_seqlens_q=offsets([6]))
    for reason in ("a padding one with thd, got 'causal'", "cu_seqlens_kv must be given with thd, got None"):
        assert reason in str(error.value)
    assert "cu_seqlens_q must" not in str(error.value)


def test_heads_of_another_module_are_refused() -> None:
    q, _, v = inputs([6], [6])
    with pytest.raises(
        ValueError, match=r"key_layer must have 4 dims with bshd and end in \[2, 16\], got \[1, 6, 4, 16\]"
    ):
        module(qkv_format="bshd")(q[0][None], q[0][None], v[0][None])


def test_masks_with_holes_are_refused() -> None:
    q, k, v = inputs([6], [6])
    hidden = torch.tensor([False, True, False, False, False, False])[None, None, None]
    with pytest.raises(RuntimeError, match="must keep one run of tokens a sequence"):
        module(qkv_format="bshd", attn_mask_type="padding")(q[0][None], k[0][None], v[0][None], hidden)
    nothing = torch.ones(1, 1, 1, 6, dtype=torch.bool)
    out, _ = module(qkv_format="bshd", attn_mask_type="padding")(q[0][None], k[0][None], v[0][None], nothing)
    assert not out.any()


def test_dropout_is_refused_in_training_alone() -> None:
    q, k, v = inputs([6], [6])
    given = [x[0][None] for x in (q, k, v)]
    made = module(qkv_format="bshd", attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"attention_dropout must be 0 in training, got 0.1"):
        made(*given)
    assert torch.equal(made.eval()(*given)[0], module(qkv_format="bshd")(*given)[0])


@pytest.mark.parametrize(
    "name", ["transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"]
)
@pytest.mark.parametrize(("enabled", "attention"), [(True, True), (True, False), (False, True)])
def test_fp8_attention_is_refused(
    name: str, enabled: bool, attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names under which TransformerEngine's releases keep their state; the real one is asked in test_gpu."""
    state = SimpleNamespace(
        is_fp8_enabled=lambda: enabled, get_fp8_recipe=lambda: SimpleNamespace(fp8_dpa=attention)
    )
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(FP8GlobalStateManager=state))
    q, k, v = inputs([6], [6])
    given = [x[0][None] for x in (q, k, v)]
    if enabled and attention:
        with pytest.raises(ValueError, match="fp8 attention cannot be honoured: set fp8_dpa=False"):
            module(qkv_format="bshd")(*given)
    else:
        module(qkv_format="bshd")(*given)


def test_state_dicts() -> None:
    made, other = module(softmax_type="learnable"), module(softmax_type="learnable")
    assert list(made.state_dict()) == ["softmax_offset"]
    other.load_state_dict(
        {**made.state_dict(), "_extra_state": torch.empty(0)}
    )  # TransformerEngine's has one
    assert torch.equal(made.softmax_offset, other.softmax_offset)
    assert not module(softmax_type="off-by-one").state_dict() and not module().state_dict()


def test_it_needs_no_transformer_engine() -> None:
    code = (
        "import sys; sys.modules['transformer_engine'] = None\n"
        "import rl_attn_plugin.integrations.transformer_engine as t; print(t.DotProductAttention(4, 16))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

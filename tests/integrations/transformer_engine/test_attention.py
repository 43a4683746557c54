"""TransformerEngine's meaning of every mask, format, window and softmax, against attention written plainly."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_attn_plugin.integrations.transformer_engine import DotProductAttention

HEADS, GROUPS, DIM, V_DIM = 4, 2, 16, 24
MASKS = [
    "no_mask", "padding", "causal", "padding_causal", "padding,causal", "causal,padding", "causal_bottom_right",
    "padding_causal_bottom_right",
]  # fmt: skip


def plain(
    q: Tensor, k: Tensor, v: Tensor, mask: str, window: tuple[int, int] | None, sinks: Tensor | None,
    bottom_right: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence in fp64, ``[s, h, d]``: out and lse ``[h, s]``."""
    sq, sk = q.shape[0], k.shape[0]
    right = (
        bottom_right
        if bottom_right is not None
        else mask not in ("causal", "padding_causal", "padding,causal", "causal,padding")
    )
    i = torch.arange(sq)[:, None] + (sk - sq if right else 0)
    j = torch.arange(sk)[None]
    hidden = torch.zeros(sq, sk, dtype=torch.bool)
    if "causal" in mask:
        hidden |= j > i
    if window is not None and window[0] >= 0:
        hidden |= j < i - window[0]
    if window is not None and window[1] >= 0:
        hidden |= j > i + window[1]
    k, v = (x.double().repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = (torch.einsum("ihd,jhd->hij", q.double(), k) * DIM**-0.5).masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, sq, 1)), -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0, lse)[..., None])[..., :sk]
    return torch.einsum("hij,jhd->ihd", weights, v), lse


def module(**options: Any) -> DotProductAttention:
    made = DotProductAttention(HEADS, (DIM, V_DIM), GROUPS, return_lse=True, **options)
    if isinstance(made.softmax_offset, torch.nn.Parameter):
        with torch.no_grad():
            made.softmax_offset.normal_()
    return made


def inputs(sq: list[int], sk: list[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    torch.manual_seed(sum(sq))
    q = [torch.randn(n, HEADS, DIM) for n in sq]
    return q, [torch.randn(n, GROUPS, DIM) for n in sk], [torch.randn(n, GROUPS, V_DIM) for n in sk]


def check(out: Tensor, lse: Tensor, wanted: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(out.double(), wanted[0].flatten(1), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-5, atol=2e-6)


def batched(parts: list[Tensor], length: int) -> Tensor:
    """Padded on the right, with NaN, which nothing may read."""
    out = torch.full((len(parts), length, *parts[0].shape[1:]), torch.nan)
    for row, part in zip(out, parts, strict=True):
        row[: part.shape[0]] = part
    return out


@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("window", [None, (5, 0), (3, 4), (-1, 2)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_batches(layout: str, mask: str, window: tuple[int, int] | None, softmax: str) -> None:
    padded = "padding" in mask
    sq, sk = ([9, 13, 4], [17, 13, 20]) if padded else ([13] * 3, [20] * 3)
    q, k, v = inputs(sq, sk)
    made = module(qkv_format=layout, attn_mask_type=mask, window_size=window, softmax_type=softmax)
    given = [batched(x, n) for x, n in ((q, 13), (k, 20), (v, 20))]
    if layout == "sbhd":
        given = [x.transpose(0, 1).contiguous() for x in given]
    lengths = [torch.tensor([0, *n]).cumsum(0).int() for n in (sq, sk)]
    masks = tuple(
        torch.arange(n)[None, None, None] >= torch.tensor(m)[:, None, None, None]
        for n, m in ((13, sq), (20, sk))
    )
    ways: list[dict[str, Any]] = (
        [{"cu_seqlens_q": lengths[0], "cu_seqlens_kv": lengths[1]}, {"attention_mask": masks}]
        if padded
        else [{}]
    )
    for way in ways:
        out, lse = made(*given, **way)
        assert out.shape == ((13, 3, HEADS * V_DIM) if layout == "sbhd" else (3, 13, HEADS * V_DIM))
        assert lse.shape == (3, HEADS, 13)
        out = out.transpose(0, 1) if layout == "sbhd" else out
        for b, n in enumerate(sq):
            check(out[b, :n], lse[b, :, :n], plain(q[b], k[b], v[b], mask, window, made.softmax_offset))
            assert not out[b, n:].any() and bool(torch.isneginf(lse[b, :, n:]).all())


@pytest.mark.parametrize("window", [None, (5, 0), (3, 4)])
@pytest.mark.parametrize("mask", [m for m in MASKS if "padding" in m])
@pytest.mark.parametrize("between", [False, True])
def test_packed(between: bool, mask: str, window: tuple[int, int] | None) -> None:
    sq, sk = [9, 0, 13, 4], [17, 5, 13, 20]
    q, k, v = inputs(sq, sk)
    made = module(qkv_format="thd", attn_mask_type=mask, window_size=window, softmax_type="learnable")
    offsets = [torch.tensor([0, *n]).cumsum(0).int() for n in (sq, sk)]
    more: dict[str, Any] = {}
    places = [o.tolist() for o in offsets]
    given = [torch.cat(x) for x in (q, k, v)]
    if between:
        wide = [
            [0, *torch.tensor([-(-n // 8) * 8 for n in lengths]).cumsum(0).tolist()] for lengths in (sq, sk)
        ]
        places = wide
        more = {
            "cu_seqlens_q_padded": torch.tensor(wide[0]).int(), "cu_seqlens_kv_padded": torch.tensor(wide[1]).int(),
            "pad_between_seqs": True,
        }  # fmt: skip
        laid = []
        for parts, at in ((q, wide[0]), (k, wide[1]), (v, wide[1])):
            x = torch.full((at[-1], *parts[0].shape[1:]), torch.nan)
            for part, begin in zip(parts, at, strict=False):
                x[begin : begin + part.shape[0]] = part
            laid.append(x)
        given = laid
    out, lse = made(
        *given, cu_seqlens_q=offsets[0], cu_seqlens_kv=offsets[1], max_seqlen_q=64, max_seqlen_kv=64, **more
    )
    for b, (begin, end) in enumerate(pairwise(places[0])):
        rows = slice(begin, begin + sq[b])
        check(out[rows], lse[:, rows], plain(q[b], k[b], v[b], mask, window, made.softmax_offset))
        assert not out[rows.stop : end].any()


@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
def test_the_diagonal_can_be_told(mask: str) -> None:
    q, k, v = inputs([7], [12])
    for right in (False, True):
        made = module(qkv_format="bshd", attn_mask_type=mask, window_size=(4, 3))
        out, lse = made(q[0][None], k[0][None], v[0][None], bottom_right_diagonal=right)
        check(out[0], lse[0], plain(q[0], k[0], v[0], mask, (4, 3), None, bottom_right=right))


def test_arguments_of_a_call_win() -> None:
    q, k, v = inputs([6], [6])
    made = module(qkv_format="sbhd", attn_mask_type="causal")
    out, lse = made(
        q[0][None], k[0][None], v[0][None], qkv_format="bshd", attn_mask_type="no_mask", window_size=(1, 1)
    )
    check(out[0], lse[0], plain(q[0], k[0], v[0], "no_mask", (1, 1), None))


def test_largest_logits_and_plain_output() -> None:
    q, k, v = inputs([8], [8])
    made = DotProductAttention(HEADS, (DIM, V_DIM), GROUPS, qkv_format="bshd", return_max_logit=True)
    out, largest = made(q[0][None], k[0][None], v[0][None])
    scores = torch.einsum("ihd,jhd->hij", q[0], k[0].repeat_interleave(2, 1)) * DIM**-0.5
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(largest, scores.amax((1, 2)))
    alone = DotProductAttention(HEADS, (DIM, V_DIM), GROUPS, qkv_format="bshd")(
        q[0][None], k[0][None], v[0][None]
    )
    assert isinstance(alone, Tensor) and torch.equal(alone, out)


def test_gradients_and_checkpointing() -> None:
    q, k, v = inputs([11], [11])
    made = module(qkv_format="bshd", softmax_type="learnable", window_size=(4, 0))
    assert isinstance(made.softmax_offset, torch.nn.Parameter)
    found = []
    for again in (False, True):
        leaves = [x[0][None].clone().requires_grad_() for x in (q, k, v)]
        out, lse = made(*leaves, checkpoint_core_attention=again)
        found.append(torch.autograd.grad(out.square().sum() + lse.sum(), (*leaves, made.softmax_offset)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    exact = [x[0].double().requires_grad_() for x in (q, k, v)]
    sinks = made.softmax_offset.detach().double().requires_grad_()
    out, lse = plain(*exact, "causal", (4, 0), sinks)
    wanted = torch.autograd.grad(out.square().sum() + lse.sum(), (*exact, sinks))
    for got, right in zip(found[0], wanted, strict=True):
        torch.testing.assert_close(got.double().view(right.shape), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout must be 0, got 0.1"),
        ({"qkv_format": "hbsd"}, "qkv_format must be one of ['sbhd', 'bshd', 'thd'], got 'hbsd'"),
        ({"attn_mask_type": "arbitrary"}, "attn_mask_type must be one of"),
        (
            {"softmax_type": "hard"},
            "softmax_type must be one of ['vanilla', 'off-by-one', 'learnable'], got 'hard'",
        ),
        ({"tp_size": 3}, "must be multiples of tp_size, got 4, 2 and 3"),
        ({"cp_group": object()}, "cp_group must be None: there is no context parallelism"),
        ({"flavour": 1}, "there are no arguments ['flavour']"),
    ],
)
def test_what_the_constructor_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        module(**options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"core_attention_bias_type": "alibi"}, "core_attention_bias_type must be 'no_bias', got 'alibi'"),
        ({"alibi_slopes": torch.zeros(4)}, "alibi_slopes cannot be honoured: leave it out"),
        ({"inference_params": object()}, "inference_params cannot be honoured"),
        ({"fp8_output": True}, "fp8_output cannot be honoured"),
        ({"score_mod": len}, "score_mod cannot be honoured"),
        ({"qkv_layer": torch.zeros(1)}, "qkv_layer cannot be honoured"),
        ({"qkv_format": "thd"}, "query_layer must have 3 dims with thd, got [1, 6, 4, 16]"),
        (
            {"attn_mask_type": "padding"},
            "padding must be told by cu_seqlens_q and cu_seqlens_kv or by attention_mask",
        ),
    ],
)
def test_what_a_call_refuses(options: dict[str, Any], message: str) -> None:
    q, k, v = inputs([6], [6])
    with pytest.raises(ValueError) as error:
        module(qkv_format="bshd")(q[0][None], k[0][None], v[0][None], **options)
    assert message in str(error.value)


def test_packed_needs_offsets_and_padding() -> None:
    q, k, v = inputs([6], [6])
    with pytest.raises(
        ValueError, match=r"(?s)must be a padding one with thd, got 'causal'.*cu_seqlens_kv must be given"
    ):
        module(qkv_format="thd")(q[0], k[0], v[0])


def test_it_needs_no_transformer_engine() -> None:
    code = (
        "import sys; sys.modules['transformer_engine'] = None\n"
        "import rl_attn_plugin.integrations.transformer_engine as t; print(t.DotProductAttention(4, 16))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("window", [None, (64, 0)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_against_the_real_one(layout: str, mask: str, window: tuple[int, int] | None, softmax: str) -> None:
    """bf16 on a GPU: as far from fp64 as TransformerEngine's own result, twice over, at most."""
    from transformer_engine.pytorch import DotProductAttention as Theirs

    if layout == "thd" and "padding" not in mask:
        pytest.skip("thd needs a padding mask in both")
    if window is not None and "causal" not in mask:
        window = (64, 64)
    sq = [100, 256, 33] if "padding" in mask else [256] * 3
    q, k, v = ([torch.randn(n, h, 64, device="cuda").bfloat16() for n in sq] for h in (HEADS, GROUPS, GROUPS))
    options: dict[str, Any] = {
        "qkv_format": layout, "attn_mask_type": mask, "window_size": window, "softmax_type": softmax,
    }  # fmt: skip
    theirs = Theirs(HEADS, 64, num_gqa_groups=GROUPS, attention_dropout=0.0, **options).cuda()
    ours = DotProductAttention(HEADS, 64, GROUPS, **options).cuda()
    if softmax == "learnable":
        with torch.no_grad():
            ours.softmax_offset.normal_()  # type: ignore[union-attr]
            theirs.softmax_offset.copy_(ours.softmax_offset.view(theirs.softmax_offset.shape))
    cu = torch.tensor([0, *sq], device="cuda").cumsum(0).int()
    given: list[Tensor]
    if layout == "thd":
        given = [torch.cat(x) for x in (q, k, v)]
    else:
        given = [
            torch.nan_to_num(batched([y.cpu().float() for y in x], 256)).bfloat16().cuda() for x in (q, k, v)
        ]
        given = [x.transpose(0, 1).contiguous() if layout == "sbhd" else x for x in given]
    more = (
        {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 256, "max_seqlen_kv": 256}
        if "padding" in mask
        else {}
    )
    try:
        reference = theirs(*given, **more)
    except (ValueError, AssertionError, RuntimeError) as refusal:
        pytest.skip(f"TransformerEngine has no backend for this: {str(refusal).splitlines()[0][:80]}")
    mine = ours(*given, **more)
    sinks = None if ours.softmax_offset is None else ours.softmax_offset.detach().cpu()
    for b, n in enumerate(sq):
        take = {
            "thd": lambda x, b=b, n=n: x[int(cu[b]) : int(cu[b]) + n],
            "bshd": lambda x, b=b, n=n: x[b, :n],
            "sbhd": lambda x, b=b, n=n: x[:n, b],
        }[layout]
        out, _ = _plain_64(q[b].cpu(), k[b].cpu(), v[b].cpu(), mask, window, sinks)
        exact = out.flatten(1)
        errors = [(take(x).cpu().double() - exact).norm() for x in (mine, reference)]
        assert errors[0] <= 2 * errors[1] + torch.finfo(torch.bfloat16).eps * exact.norm()


def _plain_64(
    q: Tensor, k: Tensor, v: Tensor, mask: str, window: tuple[int, int] | None, sinks: Tensor | None
) -> Any:
    return plain(q * (DIM / 64) ** 0.5 * 1.0, k, v, mask, window, sinks) if q.shape[-1] == 64 else None

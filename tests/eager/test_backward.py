"""Gradients of ``impl="torch"`` against the fp64 oracle's autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_attn_plugin import Schedule, flash_attention, flash_attention_varlen, merge_attention
from rl_attn_plugin.reference import attention_reference
from tests.tensors import ints, offsets

SMALL_SPLITS = Schedule(block_k=16, split_k=64)


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def budget(exact: Tensor, rough: Tensor, lse: Tensor, dtype: torch.dtype) -> float:
    """Promise 3 for a gradient, in the derived terms of a backward that reads its forward's results.

    Twice the independent run's error, plus one rounding of the gradient, plus what the stored inputs of the
    backward carry: ``lse`` rounded to fp32 shifts every probability by eps32 * |lse|, and ``out`` rounded to
    ``dtype`` shifts delta by one rounding.
    """
    size = max(exact.abs().max().item(), 1.0)
    own = torch.finfo(dtype).eps * (1 if dtype is torch.float32 else 2) * size
    stored = torch.finfo(torch.float32).eps * lse[torch.isfinite(lse)].abs().max().item() * size
    return 2 * (rough.double() - exact).abs().max().item() + own + stored


def oracle(
    tensors: list[Tensor], weights: tuple[Tensor, Tensor], dtype: torch.dtype, **options: object
) -> list[Tensor]:
    """Gradients of sum(out * w) + sum(lse * u) in the given precision, -inf rows of lse left out."""
    copies = [x.detach().to(dtype).requires_grad_() for x in tensors]
    sinks = copies[3] if len(copies) > 3 else None
    out, lse = attention_reference(*copies[:3], sinks=sinks, dtype=dtype, **options)
    finite = torch.isfinite(lse)
    loss = (out * weights[0].to(dtype)).sum() + (lse[finite] * weights[1].to(dtype)[finite]).sum()
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in copies]
    return list(torch.autograd.grad(loss, copies, allow_unused=True, materialize_grads=True))


CASES = [
    {"causal": False},
    {},
    {"causal_alignment": "top_left"},
    {"window": (7, 0)},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": (9, 0), "softcap": 2.0, "sinks": True},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_varlen_gradients(dtype: torch.dtype, options: dict[str, object]) -> None:
    """Ragged packing with empty sequences, Sq > Sk, padding past the last sequence, through out and lse."""
    torch.manual_seed(0)
    q_lengths, k_lengths, extra = [37, 0, 5, 9, 64], [37, 4, 0, 3, 70], 6
    cu_q, cu_k = offsets(q_lengths), offsets(k_lengths)
    total_q, total_k = int(cu_q[-1]) + extra, int(cu_k[-1]) + extra
    tensors = [
        leaf(total_q, 6, 40, dtype=dtype),
        leaf(total_k, 2, 40, dtype=dtype),
        leaf(total_k, 2, 24, dtype=dtype),
    ]
    arguments = dict(options)
    if arguments.pop("sinks", False):
        tensors.append(leaf(6, dtype=torch.float32))
    sinks = tensors[3] if len(tensors) > 3 else None
    result = flash_attention_varlen(
        *tensors[:3], cu_q, cu_k, 999, 999, sinks=sinks, schedule=SMALL_SPLITS, **arguments
    )
    weights = torch.randn_like(result.out, dtype=torch.float32), torch.randn_like(result.lse)
    finite = torch.isfinite(result.lse)
    loss = (result.out.float() * weights[0]).sum() + (result.lse[finite] * weights[1][finite]).sum()
    got = torch.autograd.grad(loss, tensors)
    expected = {p: [torch.zeros(x.shape, dtype=p) for x in tensors] for p in (torch.float64, torch.float32)}
    for b in range(len(q_lengths)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        part = [tensors[0][rows], tensors[1][keys], tensors[2][keys], *tensors[3:]]
        mine = weights[0][rows].to(dtype).float(), weights[1][:, rows]
        for precision, sums in expected.items():
            grads = oracle(part, mine, precision, **arguments)
            for total, grad, where in zip(sums, grads, (rows, keys, keys, slice(None)), strict=False):
                total[where] += grad
    for name, grad, exact, rough in zip(
        ("dq", "dk", "dv", "dsinks"), got, expected[torch.float64], expected[torch.float32], strict=False
    ):
        error = (grad.double() - exact).abs().max().item()
        assert error <= budget(exact, rough, result.lse.detach(), dtype), (name, error)
    for grad, cu in ((got[0], cu_q), (got[1], cu_k), (got[2], cu_k)):
        assert torch.equal(grad[cu[-1] :], torch.zeros_like(grad[cu[-1] :]))


def test_masked_rows_and_strided_gradients() -> None:
    """A sequence that the padding mask hides entirely, dO expanded and transposed, q k v head-major views."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, h, 33, 32).requires_grad_() for h in (4, 2, 2))
    mask = torch.rand(2, 33) > 0.4
    mask[1] = False
    views = [x.transpose(1, 2) for x in (q, k, v)]
    result = flash_attention(*views, key_padding_mask=mask)
    assert torch.equal(result.out[1], torch.zeros_like(result.out[1]))
    strange = torch.randn(4, 1, 32).transpose(0, 1).expand(2, 33, 4, 32)
    got = torch.autograd.grad(result.out, (q, k, v), strange)
    copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
    outs = [attention_reference(*(x[b].transpose(0, 1) for x in copies), keep=mask[b])[0] for b in range(2)]
    want = torch.autograd.grad(torch.stack(outs), copies, strange.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
        assert torch.equal(a[1], torch.zeros_like(a[1]))


def test_gradients_do_not_depend_on_the_packing() -> None:
    torch.manual_seed(2)
    lengths = [50, 3, 129]
    cu = offsets(lengths)
    q, k, v = (leaf(sum(lengths), h, 64, dtype=torch.bfloat16) for h in (4, 2, 2))
    weight = torch.randn(sum(lengths), 4, 64, dtype=torch.bfloat16)
    out = flash_attention_varlen(q, k, v, cu, cu, 129, 129).out
    packed = torch.autograd.grad(out, (q, k, v), weight)
    again = torch.autograd.grad(flash_attention_varlen(q, k, v, cu, cu, 500, 500).out, (q, k, v), weight)
    for a, b in zip(packed, again, strict=True):
        assert torch.equal(a, b)
    for b, length in enumerate(lengths):
        rows = slice(cu[b], cu[b + 1])
        alone = flash_attention_varlen(
            q[rows], k[rows], v[rows], ints(0, length), ints(0, length), length, length
        ).out
        grads = torch.autograd.grad(alone, (q, k, v), weight[rows])
        for grad, whole in zip(grads, packed, strict=True):
            assert torch.equal(grad[rows], whole[rows])


def test_merge_gradients_and_empty_states() -> None:
    torch.manual_seed(3)
    outs, lses = leaf(3, 5, 2, 8, dtype=torch.float64), leaf(3, 2, 5, dtype=torch.float64)
    merged = merge_attention(outs.float(), lses.float())
    weights = torch.randn_like(merged.out), torch.randn_like(merged.lse)
    got = torch.autograd.grad([merged.out, merged.lse], (outs, lses), weights)
    lse = torch.logsumexp(lses, 0)
    out = (torch.exp(lses - lse).transpose(-1, -2)[..., None] * outs).sum(0)
    want = torch.autograd.grad([out, lse], (outs, lses), [w.double() for w in weights])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

    one = torch.randn(4, 2, 8)
    state = torch.randn(2, 4)
    nothing, empty = torch.full_like(one, torch.nan), torch.full_like(state, -torch.inf)
    for order in ((0, 1), (1, 0)):
        pair_out, pair_lse = [one, nothing], [state, empty]
        both = merge_attention(
            torch.stack([pair_out[i] for i in order]), torch.stack([pair_lse[i] for i in order])
        )
        assert torch.equal(both.out, one) and torch.equal(both.lse, state)
    none = merge_attention(torch.zeros(2, 4, 2, 8), torch.full((2, 2, 4), -torch.inf))
    assert torch.equal(none.out, torch.zeros(4, 2, 8)) and bool((none.lse == -torch.inf).all())
    foreign = merge_attention(
        torch.stack([one, torch.zeros_like(one)]), torch.stack([state, torch.full_like(state, torch.inf)])
    )
    assert torch.equal(foreign.out, one) and torch.equal(foreign.lse, state)

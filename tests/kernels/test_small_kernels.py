"""Merge, cache writes and rotary embedding against plain fp64 or exact statements."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rl_attn_plugin.kernels.kv_cache import write_kv_cache
from rl_attn_plugin.kernels.merge import merge_attention
from rl_attn_plugin.kernels.rope import apply_rope


def partials(device: torch.device, *lead: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(*lead, 5, 3, 24, device=device).to(dtype), torch.randn(*lead, 3, 5, device=device) * 4


@pytest.mark.parametrize("lead", [(4,), (3, 2)])
def test_merge_is_the_softmax_of_all_parts(lead: tuple[int, ...], device: torch.device) -> None:
    outs, lses = partials(device, *lead)
    outs = outs.transpose(-1, -2).contiguous().transpose(-1, -2)  # strides of its own
    out, lse = merge_attention(outs, lses)
    weights = lses.double().softmax(0).transpose(-1, -2)[..., None]
    torch.testing.assert_close(out.double(), (outs.double() * weights).sum(0), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), lses.double().logsumexp(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_empty_part_changes_nothing(dtype: torch.dtype, device: torch.device) -> None:
    outs, lses = partials(device, 3, dtype=dtype)
    lses[0], lses[2] = -math.inf, math.inf  # the second convention of an empty row
    outs[2] = 0
    out, lse = merge_attention(outs, lses)
    assert torch.equal(out, outs[1]) and torch.equal(lse, lses[1])
    lses[1] = -math.inf
    outs[1] = math.nan  # whatever an empty part holds
    out, lse = merge_attention(outs[:2], lses[:2])
    assert not out.any() and bool(torch.isneginf(lse).all())


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("e4m3", [False, True])
def test_write_kv_cache(head_major: bool, e4m3: bool, device: torch.device) -> None:
    torch.manual_seed(1)
    tokens, heads, page = 9, 3, 4
    k = torch.randn(tokens, heads, 2 * 24, device=device).half()[..., ::2]
    v = torch.randn(heads, tokens, 16, device=device).half().transpose(0, 1)
    k[2] = 60000.0
    dtype = torch.float8_e4m3fn if e4m3 else torch.float16
    shapes = [(6, heads, page, d) if head_major else (6, page, heads, d) for d in (24, 16)]
    caches = [torch.full(shape, 3.0, device=device).to(dtype) for shape in shapes]
    if head_major:
        caches = [c.transpose(1, 2) for c in caches]
    slots = torch.tensor([5, 0, 23, -1, 7, 12, -1, 13, 1], device=device)
    k_scale = torch.tensor([0.5, 1.0, 3.0], device=device) if e4m3 else None
    v_scale = torch.tensor(0.7, device=device) if e4m3 else None
    write_kv_cache(k, v, *caches, slots, k_scale=k_scale, v_scale=v_scale)
    for new, cache, scale in ((k, caches[0], k_scale), (v, caches[1], v_scale)):
        wanted = torch.full(cache.shape, 3.0, device=device).to(dtype)
        for t, slot in enumerate(slots.tolist()):
            if slot >= 0:
                x = new[t].float()
                if scale is not None:
                    x = (x / scale.reshape(-1, 1)).clamp(-448, 448)
                wanted[slot // page, slot % page] = x.to(dtype)
        assert torch.equal(cache.float(), wanted.float())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [20, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope(interleaved: bool, rotary: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 3, 7, 32, device=device).to(dtype).transpose(1, 2)  # [B, S, H, D]
    positions = torch.tensor(
        [[0, 5, 9, 1, 1, 30, 31], [3, 2, 1, 0, 8, 9, 10]], device=device, dtype=torch.int32
    )
    angles = torch.arange(32, device=device)[:, None] * 10000.0 ** (
        -torch.arange(rotary // 2, device=device) / 13
    )
    cos, sin = angles.cos(), angles.sin()
    out = apply_rope(x, cos, sin, positions, interleaved=interleaved, rotary_dim=rotary, inverse=False)

    pairs = x.double()[..., :rotary]
    z = (
        torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous())
        if interleaved
        else torch.complex(*pairs.chunk(2, -1))
    )
    turn = torch.complex(cos.double(), sin.double())[positions.long()][:, :, None]
    turned = torch.view_as_real(z * turn)
    wanted = turned.flatten(-2) if interleaved else torch.cat(tuple(turned.unbind(-1)), -1)
    wanted = torch.cat((wanted, x.double()[..., rotary:]), -1)
    torch.testing.assert_close(out.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(out[..., rotary:], x[..., rotary:])
    back = apply_rope(out, cos, sin, positions, interleaved=interleaved, rotary_dim=rotary, inverse=True)
    torch.testing.assert_close(
        back.float(), x.float(), rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
    )
    packed = apply_rope(
        x[1], cos, sin, positions[1], interleaved=interleaved, rotary_dim=rotary, inverse=False
    )
    assert torch.equal(packed, out[1])

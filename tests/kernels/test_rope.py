"""A rotation inside the attention gives the bits of the rotation before it, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rl_attn_plugin.kernels.backward import attention_backward
from rl_attn_plugin.kernels.forward import attention_forward
from rl_attn_plugin.kernels.rope import apply_rope
from rl_attn_plugin.types import Layout, Rope
from tests.kernels.worlds import make_options


def tables(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.outer(
        torch.arange(4096.0, device=device), 1e4 ** -torch.linspace(0, 1, dim // 2, device=device)
    )
    return angles.cos(), angles.sin()


def check(
    dim: int, rotary: int, interleaved: bool, dtype: torch.dtype, sizes: list[int], block_k: int, split_k: int,
    device: torch.device,
) -> None:  # fmt: skip
    torch.manual_seed(dim + rotary)
    options = make_options(dim, block_k=block_k, split_k=split_k, out_dtype=dtype)
    total = sum(sizes)
    q, k, v = (torch.randn(total, h, dim, device=device).to(dtype) for h in (6, 2, 2))
    cu = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=device)
    layout = Layout(max(sizes), max(sizes), cu, cu)
    positions = torch.randint(4096, (total,), device=device)
    positions_k = torch.randint(4096, (total,), device=device, dtype=torch.int32)
    rope = Rope(*tables(rotary, device), positions, interleaved, rotary, positions_k)

    def turn(x: Tensor, at: Tensor, inverse: bool = False) -> Tensor:
        return apply_rope(
            x, rope.cos, rope.sin, at, interleaved=interleaved, rotary_dim=rotary, inverse=inverse
        )

    nothing = {"sinks": None, "k_scale": None, "v_scale": None, "out": None, "plan": None}
    turned = turn(q, positions), turn(k, positions_k)
    first = attention_forward(*turned, v, layout, options, **nothing)  # type: ignore[arg-type]
    fused = attention_forward(q, k, v, layout, options, rope=rope, **nothing)  # type: ignore[arg-type]
    assert torch.equal(first[0], fused[0]) and torch.equal(first[1], fused[1])
    still = attention_forward(q, k, v, layout, options, **nothing)  # type: ignore[arg-type]
    assert not torch.equal(still[0], fused[0])

    dout, dlse = torch.randn_like(first[0]), torch.randn_like(first[1])
    given = dout, dlse, *turned, v, *first[:2], layout, options
    dq, dk, dv, _ = attention_backward(*given, sinks=None)
    inside = attention_backward(dout, dlse, q, k, v, *first[:2], layout, options, sinks=None, rope=rope)
    for got, want in zip(inside, (turn(dq, positions, True), turn(dk, positions_k, True), dv), strict=False):
        assert torch.equal(got, want)

    # one query over a paged cache whose keys were rotated as they were written
    page = 16
    table = torch.arange((sizes[0] + page - 1) // page, device=device, dtype=torch.int32)[None]
    cache = torch.full((2, table.shape[1] * page, 2, dim), torch.nan, device=device, dtype=dtype)
    cache[0, : sizes[0]], cache[1, : sizes[0]] = turned[1][: sizes[0]], v[: sizes[0]]
    one = torch.tensor([0, 1], device=device, dtype=torch.int32)
    paged = Layout(1, sizes[0], one, None, None, cu[1:2], None, table)
    at = sizes[0] - 1
    decoded = attention_forward(
        q[at : at + 1], *cache.unflatten(1, (-1, page)), paged, options,
        rope=replace(rope, positions=positions[at : at + 1]), **nothing,  # type: ignore[arg-type]
    )  # fmt: skip
    assert torch.equal(decoded[0][0], fused[0][at]) and torch.equal(decoded[1][:, 0], fused[1][:, at])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rotary", "interleaved"), [(24, False), (24, True), (10, False), (10, True)])
def test_fused_rope_equals_rope_first(
    rotary: int, interleaved: bool, dtype: torch.dtype, device: torch.device
) -> None:
    check(24, rotary, interleaved, dtype, [37, 0, 20], 16, 32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("dim", "rotary", "interleaved"),
    [(64, 64, False), (80, 32, True), (128, 128, False), (128, 128, True), (256, 64, False)],
)
def test_fused_rope_equals_rope_first_over_many_tiles(
    dim: int, rotary: int, interleaved: bool, dtype: torch.dtype, device: torch.device
) -> None:
    check(dim, rotary, interleaved, dtype, [1500, 0, 333], 32 if dim > 128 else 64, 1024, device)

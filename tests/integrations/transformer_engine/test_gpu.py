"""Against the real TransformerEngine on a GPU, in bf16: one row of a table for every mask, format, window and softmax.

The table goes to the terminal, and as JSON to the file that RL_ATTN_TE_TABLE names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_attn_plugin.integrations.transformer_engine import DotProductAttention, swap_attention
from tests.integrations.transformer_engine.oracle import MASKS, SOFTMAX, attend, offsets, padding_masks

pytestmark = [pytest.mark.gpu, pytest.mark.te, pytest.mark.filterwarnings("default")]
HEADS, GROUPS, DIM, LENGTH = 16, 4, 64, 512
NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    yield rows
    path = os.environ.get("RL_ATTN_TE_TABLE")
    if path:
        Path(path).write_text(json.dumps(rows, indent=1))
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None:
        return
    terminal.write_line(
        f"\n{'format':7}{'mask':29}{'window':11}{'softmax':12}{'cross':7}relative error, ours / TransformerEngine's"
    )
    for row in rows:
        errors = row.get("errors")
        said = (
            row["refused"]
            if errors is None
            else "  ".join(f"{n} {a:.1e}/{b:.1e}" for n, (a, b) in errors.items())
        )
        terminal.write_line(
            f"{row['format']:7}{row['mask']:29}{row['window']!s:11}{row['softmax']:12}{row['cross']!s:7}{said}"
        )


def exactly(
    parts: list[list[Tensor]], waves: list[Tensor], mask: str, window: Any, sinks: Tensor | None
) -> list[list[Tensor]]:
    """Out, dq, dk and dv of each sequence in fp64."""
    found = []
    for q, k, v, wave in zip(*parts, waves, strict=True):
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        out, _ = attend(*leaves, mask, window, sinks)
        found.append([out.flatten(1), *torch.autograd.grad(out.flatten(1), leaves, wave.double())])
    return found


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("softmax", SOFTMAX)
@pytest.mark.parametrize("window", [None, (64, 0), (64, 64)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_no_worse_than_the_real_one(
    layout: str,
    mask: str,
    window: tuple[int, int] | None,
    softmax: str,
    cross: bool,
    table: list[dict[str, Any]],
) -> None:
    """At most twice its error against fp64, plus one rounding; cross: fewer queries than keys, which tells diagonals."""
    from transformer_engine.pytorch import DotProductAttention as Theirs

    if layout == "thd" and "padding" not in mask:
        pytest.skip("thd needs a padding mask in both")
    if window is not None and ("causal" in mask) != (window[1] == 0):
        pytest.skip("a window that the mask clamps is another row")
    torch.manual_seed(0)
    queries = [100, LENGTH, 33] if "padding" in mask else [LENGTH] * 3
    keys = queries
    if cross:
        queries, room = [n // 2 for n in queries], LENGTH // 2
    else:
        room = LENGTH
    lengths = (queries, keys, keys)
    parts = [
        [torch.randn(n, h, DIM, device="cuda").bfloat16() for n in side]
        for side, h in zip(lengths, (HEADS, GROUPS, GROUPS), strict=True)
    ]
    waves = [torch.randn(n, HEADS * DIM, device="cuda").bfloat16() for n in queries]
    options: dict[str, Any] = {
        "num_gqa_groups": GROUPS, "qkv_format": layout, "attn_mask_type": mask, "window_size": window,
        "softmax_type": softmax, "attention_type": "cross" if cross else "self",
    }  # fmt: skip
    theirs, ours = Theirs(HEADS, DIM, **options), DotProductAttention(HEADS, DIM, **options)
    sinks = None
    if softmax != "vanilla":
        if softmax == "learnable":
            with torch.no_grad():
                ours.softmax_offset.normal_()
                theirs.softmax_offset.copy_(ours.softmax_offset.view_as(theirs.softmax_offset))
        sinks = ours.softmax_offset.detach()

    def laid(pieces: list[Tensor], length: int) -> Tensor:
        if layout == "thd":
            return torch.cat(pieces)
        x = torch.zeros(len(pieces), length, *pieces[0].shape[1:], device="cuda", dtype=torch.bfloat16)
        for row, piece in zip(x, pieces, strict=True):
            row[: len(piece)] = piece
        return x.transpose(0, 1).contiguous() if layout == "sbhd" else x

    def taken(x: Tensor, side: list[int]) -> list[Tensor]:
        if layout == "thd":
            return list(x.split(side))
        x = x.transpose(0, 1) if layout == "sbhd" else x
        return [row[:n] for row, n in zip(x, side, strict=True)]

    more: dict[str, Any] = {}
    if layout == "thd":
        more = {
            "cu_seqlens_q": offsets(queries).cuda(), "cu_seqlens_kv": offsets(keys).cuda(), "max_seqlen_q": room,
            "max_seqlen_kv": LENGTH,
        }  # fmt: skip
    elif "padding" in mask:
        both = padding_masks(queries, room).cuda(), padding_masks(keys, LENGTH).cuda()
        more = {"attention_mask": both if cross else both[0]}
    sizes = (room, LENGTH, LENGTH)

    def run(module: Any) -> list[list[Tensor]]:
        leaves = [laid(x, n).requires_grad_() for x, n in zip(parts, sizes, strict=True)]
        out = module(*leaves, **more)
        grads = torch.autograd.grad(out, leaves, laid(waves, room))
        split = [taken(x, side) for x, side in zip((out, *grads), (queries, *lengths), strict=True)]
        return [list(sequence) for sequence in zip(*split, strict=True)]

    row: dict[str, Any] = {
        "format": layout,
        "mask": mask,
        "window": window,
        "softmax": softmax,
        "cross": cross,
    }
    table.append(row)
    try:
        reference = run(theirs)
    except (ValueError, AssertionError, RuntimeError) as refusal:
        row["refused"] = f"TransformerEngine: {str(refusal).splitlines()[0][:70]}"
        pytest.skip(row["refused"])
    found, exact = run(ours), exactly(parts, waves, mask, window, sinks)
    row["errors"] = {}
    for n, name in enumerate(NAMES):
        right = torch.cat([sequence[n].flatten() for sequence in exact])
        mine, other = (torch.cat([s[n].flatten().double() for s in x]) for x in (found, reference))
        size = float(right.norm())
        row["errors"][name] = [float((x - right).norm()) / size for x in (mine, other)]
    worse = {n: e for n, e in row["errors"].items() if e[0] > 2 * e[1] + torch.finfo(torch.bfloat16).eps}
    assert not worse


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_nothing_waits_for_the_device(layout: str) -> None:
    ours = DotProductAttention(
        HEADS, DIM, qkv_format=layout, attn_mask_type="padding_causal", softmax_type="learnable"
    )
    shape = (LENGTH, HEADS, DIM) if layout == "thd" else (2, LENGTH, HEADS, DIM)
    leaves = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    cu = offsets([100, 0, 300]).cuda()
    more = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu} if layout == "thd" else {
        "attention_mask": padding_masks([LENGTH, 100], LENGTH, "left").cuda()
    }  # fmt: skip
    ours(*leaves, **more).sum().backward()  # kernels are compiled and loaded here
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(*leaves, **more).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_fp8_attention_is_refused() -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    x = torch.randn(16, 2, HEADS, DIM, device="cuda").bfloat16()
    ours = DotProductAttention(HEADS, DIM)
    with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(fp8_dpa=False)):
        ours(x, x, x)
    with (
        te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(fp8_dpa=True)),
        pytest.raises(ValueError, match="fp8 attention cannot be honoured"),
    ):
        ours(x, x, x)


@pytest.mark.parametrize("mask", ["causal", "padding_causal"])
def test_swap_in_a_real_layer(mask: str) -> None:
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    layer = te.TransformerLayer(
        HEADS * DIM, 4 * HEADS * DIM, HEADS, num_gqa_groups=GROUPS, attention_dropout=0.0, hidden_dropout=0.0,
        self_attn_mask_type=mask, params_dtype=torch.bfloat16,
    )  # fmt: skip
    original = layer.self_attention.core_attention
    x = torch.randn(LENGTH, 2, HEADS * DIM, device="cuda").bfloat16()
    hidden = padding_masks([LENGTH, 100], LENGTH).cuda() if "padding" in mask else None
    before = layer(x, attention_mask=hidden)
    with swap_attention(layer) as handle:
        assert handle.replaced == ["self_attention.core_attention"] and not handle.left
        assert type(layer.self_attention.core_attention) is DotProductAttention
        inside = layer(x, attention_mask=hidden)
        layer.load_state_dict(layer.state_dict())
    assert layer.self_attention.core_attention is original
    for b, n in enumerate([LENGTH, 100] if "padding" in mask else [LENGTH, LENGTH]):
        torch.testing.assert_close(inside[:n, b], before[:n, b], rtol=5e-2, atol=5e-2)
    assert not torch.equal(inside, before)


def test_checkpoints_go_both_ways() -> None:
    from transformer_engine.pytorch import DotProductAttention as Theirs

    theirs = Theirs(HEADS, DIM, softmax_type="learnable")
    ours = DotProductAttention(HEADS, DIM, softmax_type="learnable")
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.softmax_offset, theirs.softmax_offset)
    theirs.load_state_dict(ours.state_dict(), strict=False)

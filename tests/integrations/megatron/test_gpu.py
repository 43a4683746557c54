"""On a GPU: against TransformerEngine's attention in Megatron, without waiting for the device, in a CUDA graph."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="needs Megatron-core: pip install 'rl-attn-plugin[megatron]'")

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.enums import AttnMaskType

from rl_attn_plugin.integrations.megatron import CoreAttention, swap_attention
from rl_attn_plugin.reference import attention_reference
from tests.integrations.megatron.models import VOCABULARY, config, model, packed, positions

pytestmark = [pytest.mark.megatron, pytest.mark.gpu, pytest.mark.filterwarnings("default")]
EDGES = (0, 700, 701, 1500, 2000, 2000, 2000, 2048)


def large(**changes: Any) -> Any:
    given = {"hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 4, "kv_channels": 64, "bf16": True,
             "params_dtype": torch.bfloat16, "use_cpu_initialization": False}  # fmt: skip
    return config(**{**given, **changes})


def inputs(*lead: int, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    shapes = ((16, 64), (4, 64), (4, 64))
    return [torch.randn(*lead, *x, device="cuda").bfloat16().requires_grad_() for x in shapes]


@pytest.mark.te
@pytest.mark.parametrize(
    "changes",
    [{}, {"window_size": (128, 0)}, {"softmax_type": "off-by-one"}, {"softmax_type": "learnable"}],
    ids=str,
)
@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_no_worse_than_transformer_engine(layout: str, changes: dict[str, Any]) -> None:
    """Outputs and gradients: at most twice TransformerEngine's error against fp64, plus one rounding."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    arguments = (large(**changes), 1, AttnMaskType.causal, "self")
    ours, theirs = CoreAttention(*arguments).cuda(), TEDotProductAttention(*arguments).cuda()
    if changes.get("softmax_type") == "learnable":
        with torch.no_grad():
            ours.softmax_offset.normal_()
            theirs.softmax_offset.copy_(ours.softmax_offset)
    qkv = inputs(2048) if layout == "thd" else inputs(512, 2)
    sequences = packed(*EDGES) if layout == "thd" else None
    wave = torch.randn(*qkv[0].shape[:-2], 1024, device="cuda").bfloat16()

    def run(core: Any) -> list[Tensor]:
        out = core(*qkv, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=sequences)
        return [out, *torch.autograd.grad(out, qkv, wave.view_as(out))]

    try:
        reference = run(theirs)
    except (ValueError, AssertionError, RuntimeError) as refusal:
        pytest.skip(f"TransformerEngine has no backend for this: {str(refusal).splitlines()[0][:80]}")
    found = run(ours)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    options = {
        "window": ours.window,
        "sinks": None if ours.softmax_offset is None else ours.softmax_offset.detach(),
    }
    if layout == "thd":
        pieces = [slice(a, b) for a, b in pairwise(EDGES) if b > a]
        out = torch.cat([attention_reference(*(x[p] for x in exact), **options)[0] for p in pieces])
    else:
        out = torch.stack([attention_reference(*(x[:, b] for x in exact), **options)[0] for b in range(2)], 1)
    wanted = [out.flatten(-2), *torch.autograd.grad(out.flatten(-2), exact, wave.double())]
    for name, mine, other, right in zip(("out", "dq", "dk", "dv"), found, reference, wanted, strict=True):
        errors = [float((x.double().view_as(right) - right).norm()) for x in (mine, other)]
        assert errors[0] <= 2 * errors[1] + torch.finfo(torch.bfloat16).eps * float(right.norm()), (
            name,
            errors,
        )


def test_nothing_waits_for_the_device() -> None:
    ours = CoreAttention(large(), 1, AttnMaskType.causal, "self").cuda()
    qkv, sequences = inputs(2048), packed(*EDGES, padded=EDGES, longest=4096)
    ours(*qkv, None, packed_seq_params=sequences).sum().backward()  # kernels are compiled and loaded here
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(*qkv, None, packed_seq_params=sequences).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cuda_graph_takes_other_lengths() -> None:
    """Megatron-RL captures the packed forward once and changes the offsets in place."""
    ours = CoreAttention(large(), 1, AttnMaskType.causal, "self").cuda().eval()
    qkv, sequences = [x.detach() for x in inputs(2048)], packed(*EDGES, longest=2048)
    with torch.no_grad():
        ours(*qkv, None, packed_seq_params=sequences)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ours(*qkv, None, packed_seq_params=sequences)
        for edges in (EDGES, (0, 3, 900, 900, 900, 900, 1200, 2048)):
            sequences.cu_seqlens_q.copy_(torch.tensor(edges))
            graph.replay()
            eager = ours(*qkv, None, packed_seq_params=packed(*edges, longest=2048))
            assert torch.equal(captured, eager)


@pytest.mark.te
def test_swap_in_a_model_of_transformer_engine_s_layers() -> None:
    made_for = large(transformer_impl="transformer_engine", softmax_type="learnable")
    made = model(made_for, get_gpt_layer_with_transformer_engine_spec()).bfloat16()
    originals = [layer.self_attention.core_attention for layer in made.decoder.layers]
    ids = torch.randint(VOCABULARY, (2, 128), device="cuda")
    before = made(ids, positions(2, 128), None)
    with swap_attention(made) as handle:
        assert len(handle.replaced) == 2 and not handle.left
        for layer, original in zip(made.decoder.layers, originals, strict=True):
            core = layer.self_attention.core_attention
            assert type(core) is CoreAttention and core.softmax_offset is original.softmax_offset
            assert core.softmax_scale == 64**-0.5
        swapped = made(ids, positions(2, 128), None)
        made.load_state_dict(made.state_dict())
    torch.testing.assert_close(swapped, before, rtol=5e-2, atol=5e-2)
    for layer, original in zip(made.decoder.layers, originals, strict=True):
        assert layer.self_attention.core_attention is original

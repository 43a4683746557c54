"""The harness on a GPU: production kernels in bf16, peers, and the installed TransformerEngine."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_attn_plugin.replay import compare_attention, synthetic_inputs

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (300, -1)},
    "softcap": {"softcap": 3.0},
    "padding": {"key_padding_mask": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_invariant_kernels_are_bit_equal(name: str, dtype: torch.dtype) -> None:
    inputs = synthetic_inputs(length=1500, heads=8, head_dim=128, dtype=dtype, device="cuda")
    changes = dict(OPTIONS[name])
    if changes.pop("key_padding_mask", False):
        lengths = torch.tensor([[1500], [777]], device="cuda")
        changes["key_padding_mask"] = torch.arange(1500, device="cuda")[None] < lengths
    report = compare_attention(replace(inputs, **changes), kv_page_size=48, impl="triton")
    assert report.verdict == "PASS", report.reasons
    for path in (
        "chunked_prefill",
        "paged_kv",
        "decode_replay",
        "decode_replay:prefix_shared",
        "fused_rope_attention",
    ):
        row = report[path]
        assert row.out.bit_equal and row.lse is not None and row.lse.bit_equal
    assert report["fused_rope_attention"].provenance.rope is not None
    assert report["fused_rope_attention"].provenance.rope["fusion_boundary"] == "inside the attention kernel"
    if name == "plain":
        drifting = [d for d in report.drifts if d.name.endswith(":decode") and not d.out.bit_equal]
        assert drifting, "no peer differs between decode and prefill: the comparison sees nothing"


def test_eight_thousand_tokens_in_twenty_seconds() -> None:
    inputs = synthetic_inputs(
        batch=1, length=8192, heads=32, kv_heads=8, head_dim=128, vocab=32768, device="cuda"
    )
    # the kernels of these shapes, compiled: a second run finds them in Triton's cache
    short = synthetic_inputs(
        batch=1, length=300, heads=32, kv_heads=8, head_dim=128, vocab=32768, device="cuda"
    )
    compare_attention(short, kv_page_size=64)
    began = time.perf_counter()
    report = compare_attention(
        inputs, require_transformer_engine=importlib.util.find_spec("transformer_engine") is not None
    )
    seconds = time.perf_counter() - began
    assert report.verdict == "PASS", report.reasons
    if "RL_ATTN_RESULTS" in os.environ:
        content = {"seconds": seconds, "report": report.to_dict()}
        Path(os.environ["RL_ATTN_RESULTS"], "compare-8k.json").write_text(json.dumps(content, indent=1))
    assert seconds < 20

"""vLLM's own engine on a CPU with the plugin's attention, against vLLM's attention and transformers' in fp64."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: see docs/vllm.md")

from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from rl_attn_plugin import flash_attention

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]

MAX_TOKENS = 10
CUSTOM = {"attention_backend": "CUSTOM"}
CHUNKED = {**CUSTOM, "enable_chunked_prefill": True, "max_num_batched_tokens": 40}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
    ),
    # soft cap, a window in every other layer, and a scale that is not D ** -0.5
    "gemma2": Gemma2Config(
        vocab_size=256, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, sliding_window=24, query_pre_attn_scalar=64,
        attn_logit_softcapping=5.0, final_logit_softcapping=None,
    ),
}  # fmt: skip


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 256, (n,), generator=generator).tolist() for n in (5, 61, 130, 33)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def saved(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
        for parameter in model.parameters():
            if parameter.dim() == 2:  # wide enough that attention is far from uniform
                torch.nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(path)
        return path

    return saved


def engines(model: Path, arms: dict[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    request = {
        "model": str(model), "prompts": prompts(), "max_tokens": MAX_TOKENS, "arms": arms, "in_process": True,
        "register": True, **changes,
    }  # fmt: skip
    asked, answered = model / "request.json", model / "result.pt"
    asked.write_text(json.dumps(request))
    script = Path(__file__).with_name("engine.py")
    done = subprocess.run(
        [sys.executable, str(script), str(asked), str(answered)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return torch.load(answered, weights_only=False)


def exact_logps(model: Path, tokens: list[list[int]]) -> list[torch.Tensor]:
    """fp64 log-probs of the sampled tokens by transformers' eager attention, a sequence at a time."""
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    found = []
    for prompt, sampled in zip(prompts(), tokens, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0])
    return found


def largest_error(result: dict[str, Any], exact: list[torch.Tensor]) -> float:
    pairs = zip(result["logps"], exact, strict=True)
    return max(float((torch.tensor(logps, dtype=torch.float64) - e).abs().max()) for logps, e in pairs)


def assert_one_prefill_has_the_same_bits(result: dict[str, Any]) -> None:
    """What each request's rows got in many steps, against one dense call over the whole sequence."""
    assert len(result["calls"]) == 2 * len(prompts())  # layers x requests
    for calls in result["calls"].values():
        places = [i for call in calls for i in range(call["start"], call["start"] + len(call["q"]))]
        assert places == list(range(len(places)))
        whole = {name: torch.cat([call[name] for call in calls]) for name in ("q", "k", "v", "out")}
        expected = flash_attention(*(whole[name][None] for name in "qkv"), **calls[0]["options"]).out[0]
        assert torch.equal(whole["out"], expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_generates_like_vllms_own_attention(name: str, folder: Callable[[str], Path]) -> None:
    model = folder(name)
    found = engines(
        model,
        {
            "native": {"dtype": "float32"},
            "plugin": {"dtype": "float32", "max_num_batched_tokens": 512, **CUSTOM},
            "chunked": {"dtype": "float32", **CHUNKED},
            "cached": {"dtype": "float32", "enable_prefix_caching": True, "block_size": 16, **CHUNKED},
        },
    )
    native = found.pop("native")
    assert native["attention"] == ["CPUAttentionBackendImpl"]
    exact = exact_logps(model, native["tokens"])
    budget = 2 * largest_error(native, exact) + torch.finfo(torch.float32).eps
    for result in found.values():
        assert result["attention"] == ["RLAttentionImpl"]
        assert result["tokens"] == native["tokens"]
        assert largest_error(result, exact) <= budget
    assert found["plugin"]["mixed_steps"] == 0
    assert found["chunked"]["mixed_steps"] > 0
    assert_one_prefill_has_the_same_bits(found["plugin"])
    assert_one_prefill_has_the_same_bits(found["chunked"])


def test_chunks_keep_bits_in_bfloat16(folder: Callable[[str], Path]) -> None:
    found = engines(folder("llama"), {"chunked": {"dtype": "bfloat16", **CHUNKED}})
    assert found["chunked"]["mixed_steps"] > 0
    assert_one_prefill_has_the_same_bits(found["chunked"])


def test_e4m3_cache(folder: Callable[[str], Path]) -> None:
    """As near to the exact cache as vLLM's own e4m3 cache is; which is not very near."""
    model = folder("llama")
    arms = {"native": {}, "plugin": {"max_num_batched_tokens": 512, **CUSTOM}, "chunked": CHUNKED}
    coarse = {"dtype": "float32", "kv_cache_dtype": "fp8_e4m3"}
    found = engines(model, {name: {**coarse, **arguments} for name, arguments in arms.items()})
    errors = {
        name: largest_error(result, exact_logps(model, result["tokens"])) for name, result in found.items()
    }
    assert found["plugin"]["attention"] == ["RLAttentionImpl"]
    assert found["plugin"]["tokens"] == found["chunked"]["tokens"]
    assert 1e-3 < errors["plugin"] <= 2 * errors["native"]


def test_worker_processes_load_the_entry_point(folder: Callable[[str], Path]) -> None:
    names = {point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert "rl_attn_plugin.integrations.vllm:register" in names
    arm = {"dtype": "float32", "max_num_batched_tokens": 512, **CUSTOM}
    found = engines(folder("llama"), {"plugin": arm}, in_process=False, register=False)
    assert found["plugin"]["attention"] == ["RLAttentionImpl"]

"""What verl does with ``external_lib`` and ``attn_implementation``: with verl itself where it is installed, else by hand."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="needs transformers: pip install 'rl-attn-plugin[transformers]'"
)

HOOK = "rl_attn_plugin.integrations.verl"


def run(script: str, *arguments: str) -> str:
    """In a fresh process: what the hook registers stays for the life of one."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


MODEL = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, architectures=["LlamaForCausalLM"],
)
transformers.AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
"""

# Two sequences packed into one row without padding, as verl's FSDP engine feeds them (use_remove_padding).
PACKED = """
ids, places = torch.arange(24)[None] % 64, torch.cat((torch.arange(14), torch.arange(10)))[None]
with torch.no_grad():
    packed = model(input_ids=ids, attention_mask=None, position_ids=places, use_cache=False).logits[0]
    alone = [model(input_ids=piece, use_cache=False).logits[0] for piece in (ids[:, :14], ids[:, 14:])]
    model.set_attn_implementation("eager")
    exact = torch.cat([model(input_ids=piece, use_cache=False).logits[0] for piece in (ids[:, :14], ids[:, 14:])])
print(bool((packed - exact).abs().max() < 1e-5), bool((torch.cat(alone) - exact).abs().max() < 1e-5))
"""


def test_a_model_loads_with_it_only_after_the_import(tmp_path: Path) -> None:
    load = "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation='rl_attn')"
    script = f"""{MODEL}
import importlib
try:
    {load}
except (ValueError, ImportError, KeyError):
    print("unknown")
importlib.import_module({HOOK!r})
{load}
print(transformers.AttentionInterface()["rl_attn"].__module__)
{PACKED}"""
    assert run(script, str(tmp_path)).split() == ["unknown", HOOK, "True", "True"]


def test_a_sequence_cut_over_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface

    from rl_attn_plugin.integrations import transformers as plugin
    from rl_attn_plugin.integrations.transformers.attention import rl_attn_forward
    from rl_attn_plugin.integrations.verl import forward_in_verl

    AttentionInterface.register("rl_attn", forward_in_verl)
    plugin.register()  # as swap_attention and others do
    assert AttentionInterface()["rl_attn"] is forward_in_verl
    AttentionInterface.register("rl_attn", rl_attn_forward)  # for the other tests of this process
    q, k = torch.randn(1, 4, 7, 16), torch.randn(1, 2, 7, 16)
    ranks = SimpleNamespace(get_ulysses_sequence_parallel_world_size=lambda: 1)
    monkeypatch.setitem(sys.modules, "verl.utils.ulysses", ranks)
    layer: Any = torch.nn.Module()
    assert forward_in_verl(layer, q, k, k, None)[0].shape == (1, 7, 4, 16)
    ranks.get_ulysses_sequence_parallel_world_size = lambda: 2
    with pytest.raises(NotImplementedError, match="ulysses_sequence_parallel_size=2"):
        forward_in_verl(layer, q, k, k, None)


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl, which is not installed")
def test_verls_own_configuration_and_patches(tmp_path: Path) -> None:
    """HFModelConfig imports the hook; the model it describes goes through verl's patches and a packed forward."""
    script = f"""{MODEL}
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.workers.config import HFModelConfig
made = HFModelConfig(
    path=sys.argv[1], load_tokenizer=False, external_lib={HOOK!r}, override_config={{"attn_implementation": "rl_attn"}}
)
print("loaded", {HOOK!r} in sys.modules, made.hf_config._attn_implementation)
model = transformers.AutoModelForCausalLM.from_pretrained(made.local_path, config=made.hf_config)
apply_monkey_patch(model, use_remove_padding=True, ulysses_sp_size=1)
print("attention", model.config._attn_implementation)
{PACKED}"""
    lines = run(script, str(tmp_path)).splitlines()
    assert "loaded True rl_attn" in lines
    assert "attention rl_attn" in lines
    assert lines[-1] == "True True"

"""TRL's GRPO on SmolLM2: sampling by ``generate``, scoring and gradients through the plugin's attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_attn_plugin.integrations import transformers as plugin
from rl_attn_plugin.integrations.transformers import attention

pytest.importorskip("trl", reason="needs TRL: pip install 'rl-attn-plugin[trl]'")

WORDS = ("cats", "the sea", "numbers", "bread")
STEPS = 3


def train(attn_implementation: str, folder: Path) -> list[dict[str, Any]]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    plugin.register()
    model = plugin.load_model("smollm2", dtype=torch.float32)
    model.set_attn_implementation(attn_implementation)
    prompts = [{"prompt": [{"role": "user", "content": f"Say something about {word}"}]} for word in WORDS]

    def variety(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(set(completion[0]["content"]))) for completion in completions]

    settings = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=4, num_generations=4, max_completion_length=16,
        max_steps=STEPS, logging_steps=1, report_to="none", use_cpu=True, bf16=False, learning_rate=1e-5, seed=1,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=variety,
        args=settings,
        train_dataset=Dataset.from_list(prompts),
        processing_class=plugin.load_tokenizer("smollm2"),
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "grad_norm" in row]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_grpo_trains_as_with_sdpa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 both attentions draw the same tokens, so rewards are equal and gradients differ by rounding alone."""
    kinds: set[str] = set()
    whole = attention.flash_attention

    def seen(q: torch.Tensor, *args: Any, **options: Any) -> Any:
        kinds.add("decode" if q.shape[1] == 1 else "prefill")
        kinds.add("gradient" if q.requires_grad else "inference")
        return whole(q, *args, **options)

    native = train("sdpa", tmp_path / "native")
    monkeypatch.setattr(attention, "flash_attention", seen)
    padded = attention.flash_attention_varlen

    def seen_padded(q: torch.Tensor, *args: Any, **options: Any) -> Any:
        kinds.add("decode" if args[4] == 1 else "prefill")
        kinds.add("gradient" if q.requires_grad else "inference")
        return padded(q, *args, **options)

    monkeypatch.setattr(attention, "flash_attention_varlen", seen_padded)
    ours = train("rl_attn", tmp_path / "ours")
    assert kinds == {"decode", "prefill", "gradient", "inference"}
    assert len(native) == len(ours) == STEPS
    for theirs, mine in zip(native, ours, strict=True):
        assert mine["reward"] == theirs["reward"] and mine["num_tokens"] == theirs["num_tokens"]
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert mine["grad_norm"] > 1  # something is learnt
        assert mine["entropy"] == pytest.approx(theirs["entropy"], rel=1e-4)

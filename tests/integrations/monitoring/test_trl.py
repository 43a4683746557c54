"""The monitor inside TRL's own GRPO loop, on SmolLM2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_attn_plugin.integrations import transformers as plugin
from rl_attn_plugin.integrations.monitoring import DriftHook, watch_grpo
from rl_attn_plugin.monitor import DriftMonitor, Judgement, Watch

pytest.importorskip("trl", reason="needs TRL: pip install 'rl-attn-plugin[trl]'")


def rollout(prompts: list[Any], trainer: Any, *, temperature: float = 1.0) -> dict[str, Any]:
    """Samples with a cache, token by token, and records each token's log-prob as it is drawn."""
    tokenizer, model = trainer.processing_class, trainer.model
    found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        cache, fed, completion, logps = None, torch.tensor([ids]), [], []
        with torch.no_grad():
            for _ in range(12):
                out = model(fed, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logp = (out.logits[0, -1].float() / temperature).log_softmax(-1)
                token = int(torch.multinomial(logp.exp(), 1))
                completion.append(token)
                logps.append(float(logp[token]))
                fed = torch.tensor([[token]])
        found["prompt_ids"].append(ids)
        found["completion_ids"].append(completion)
        found["logprobs"].append(logps)
    return found


def trainer_with(rollout_func: Any, folder: Path) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    plugin.register()
    model = plugin.load_model("smollm2", dtype=torch.float32)
    model.set_attn_implementation("rl_attn")
    words = ("cats", "the sea")
    prompts = [{"prompt": [{"role": "user", "content": f"Say something about {word}"}]} for word in words]
    settings = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=4, num_generations=4, max_completion_length=12,
        max_steps=2, logging_steps=1, report_to="none", use_cpu=True, bf16=False, learning_rate=1e-6, seed=1,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(c[0]["content"])) for c in completions],
        args=settings,
        train_dataset=Dataset.from_list(prompts),
        processing_class=plugin.load_tokenizer("smollm2"),
        rollout_func=rollout_func,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_completion_is_judged_and_logged(temperature: float, tmp_path: Path) -> None:
    """fp32 on both sides drifts by rounding alone; a rollout at another temperature than the trainer scores at does not."""
    trainer = trainer_with(
        lambda prompts, trainer: rollout(prompts, trainer, temperature=temperature), tmp_path
    )
    seen: list[tuple[Judgement, int]] = []

    class Sink:
        def write(self, judgement: Judgement, monitor: DriftMonitor, *, tokenizer: Any = None) -> None:
            seen.append((judgement, len(monitor.worst(tokenizer))))

    hook = watch_grpo(trainer, DriftHook(watch=Watch(min_tokens=20), sinks=[Sink()]))
    trainer.train()
    assert [judgement.step for judgement, _ in seen] == [1, 2] and hook.last is seen[-1][0]
    for judgement, worst in seen:
        assert judgement.metrics["tokens/compared"] == 48 and judgement.metrics["coverage"] == 1
        assert judgement.metrics["sequence/count"] == 4 and worst
        if temperature == 1.0:
            assert judgement.verdict == "PASS" and 0 < judgement.metrics["dlogp/abs_max"] < 1e-3
        else:
            assert judgement.verdict == "DRIFT" and judgement.metrics["dlogp/abs_mean"] > 0.1
    logged = [row for row in trainer.state.log_history if "drift/dlogp/abs_mean" in row]
    assert [row["drift/dlogp/abs_mean"] for row in logged] == [
        pytest.approx(judgement.metrics["dlogp/abs_mean"]) for judgement, _ in seen
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_sampling_without_log_probs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set use_vllm=True, or give a rollout_func that returns 'logprobs'"):
        watch_grpo(trainer_with(None, tmp_path))

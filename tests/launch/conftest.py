"""A tiny model with a real tokenizer, made once per session, and one quiet Ray that in-process jobs share."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_attn_plugin.launch.prompts import read_prompts

_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _make_model(folder: Path, *, seed: int = 0, context: int = 512) -> Path:
    """A two-layer Llama with grouped heads, weights large enough that attention matters, and a trained
    BPE."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        prompt.text or " ".join(content for _, content in prompt.messages or ())
        for prompt in read_prompts(None)
    ]
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=480, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=context, initializer_range=0.12,
        bos_token_id=None, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    return _make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make_model(tmp_path_factory.mktemp("model"))


def write_prompts(folder: Path) -> Path:
    """Five prompts of uneven lengths: texts and a chat."""
    rows = [
        {"id": "one", "prompt": "The harbour lay quiet under the first snow of the year"},
        {"id": "two", "prompt": "def dijkstra(graph):\n    distances = {}\n    while queue:\n"},
        {
            "id": "three",
            "messages": [{"role": "user", "content": "Why is the sky blue at noon but red at sunset?"}],
        },
        {"id": "four", "prompt": "A"},
        {"id": "five", "prompt": "List ten things that belong in a first-aid kit. " * 3},
    ]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def short_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    """Ray for jobs that run in this process; starting it for each would take most of the suite's time."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local", num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=80 * 2**20,
        log_to_driver=False, logging_level=logging.ERROR,
    )  # fmt: skip
    yield
    ray.shutdown()

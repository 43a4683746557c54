"""The text side of a model, for the process that drives the job: tokenizer, chat template and context
length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_attn_plugin.launch.errors import JobError


@dataclass(frozen=True, slots=True)
class TextModel:
    """Tokenizer and limits of a model, without its weights.

    Attributes:
        name: for people.
        path: where it was found.
        context: most tokens the model takes.
    """

    name: str
    path: str
    context: int
    _tokenizer: Any

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; special tokens written in it are recognised.

        Args:
            text: raw text or a rendered chat.
            add_special_tokens: put those before it that the tokenizer always does; a rendered chat has its
                own.
        """
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def decode(self, tokens: list[int]) -> str:
        """Text of ``tokens``, special ones included; bytes that are not UTF-8 come as U+FFFD."""
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """The tokenizer's chat template, up to where the assistant answers.

        Raises:
            ValueError: the tokenizer has no template, or the template refuses these messages.
        """
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; use prompt instead of messages")
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ValueError(str(error)) from error
        return text


def load_text_model(spec: str) -> TextModel:
    """The tokenizer and limits of a model.

    Args:
        spec: ``"smollm2"``, a folder or a hub id.

    Raises:
        JobError: there is no such model, or what is there is not one.
    """
    from rl_attn_plugin.integrations import transformers as plugin

    try:
        tokenizer = plugin.load_tokenizer(spec)
        config = plugin.load_config(spec)
    except (OSError, ValueError, ImportError) as error:
        raise JobError(f"--model {spec}: {error}") from error
    name = "SmolLM2-135M-Instruct" if spec == "smollm2" else spec
    return TextModel(name, spec, int(config.max_position_embeddings), tokenizer)

"""Prompts of a job: the dozen that come with the package, or the rows of a JSONL or Parquet file.

A row has either ``prompt`` (raw text, used as it is) or ``messages`` (a chat, rendered with the tokenizer's
own template), and optionally ``id``. Whatever is wrong is reported with the file's name and line (or row)
number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rl_attn_plugin.launch.errors import PromptError

_SHOWN_ERRORS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt as the file gives it.

    Attributes:
        prompt_id: the row's ``id``, else ``<file stem>:<line>``.
        origin: ``file:line``, for messages.
        text: raw text, or None for a chat.
        messages: ``(role, content)`` pairs, or None for raw text.
    """

    prompt_id: str
    origin: str
    text: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedPrompt:
    """A prompt ready for the model; ``text`` is what was tokenised (the rendered chat)."""

    prompt_id: str
    text: str
    tokens: tuple[int, ...]


def read_prompts(path: Path | None, limit: int | None = None) -> list[Prompt]:
    """All prompts of ``path`` (None: those of the package), or the first ``limit``.

    Raises:
        PromptError: missing, unreadable, empty or malformed; up to five bad lines are listed.
    """
    if path is None:
        data = resources.files("rl_attn_plugin.launch").joinpath("data").joinpath("prompts.jsonl")
        rows: Iterable[tuple[int, Any]] = _jsonl_rows(data.read_bytes(), "prompts.jsonl")
        name, stem = "prompts.jsonl", "prompts"
    else:
        name, stem = str(path), path.stem
        if not path.exists():
            raise PromptError(f"{name}: no such prompts file")
        if path.is_dir():
            raise PromptError(f"{name}: must be a JSONL or Parquet file, got a folder")
        try:
            rows = _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path.read_bytes(), name)
        except OSError as error:
            raise PromptError(f"{name}: cannot be read: {error.strerror or error}") from error

    prompts: list[Prompt] = []
    errors: list[str] = []
    seen: dict[str, int] = {}
    for line, row in rows:
        try:
            prompt = _parse(row, line, name, stem)
            if prompt.prompt_id in seen:
                raise ValueError(f"id {prompt.prompt_id!r} is already that of line {seen[prompt.prompt_id]}")
        except ValueError as error:
            errors.append(f"{name}:{line}: {error}")
            continue
        seen[prompt.prompt_id] = line
        prompts.append(prompt)
    if errors:
        more = f"\n(and {len(errors) - _SHOWN_ERRORS} more)" if len(errors) > _SHOWN_ERRORS else ""
        raise PromptError("\n".join(errors[:_SHOWN_ERRORS]) + more)
    if not prompts:
        raise PromptError(f"{name}: holds no prompts")
    return prompts if limit is None else prompts[:limit]


def tokenize_prompts(
    prompts: Iterable[Prompt],
    *,
    encode: Callable[[str, bool], list[int]],
    render_chat: Callable[[list[dict[str, str]]], str],
    context: int,
    max_new_tokens: int,
) -> list[TokenizedPrompt]:
    """Renders and tokenises, and refuses what the model's context cannot hold.

    Args:
        prompts: from `read_prompts`.
        encode: text, and whether to add the special tokens that start a text, to token ids.
        render_chat: chat messages to text, ending where the assistant answers; raises ValueError if it
            cannot.
        context: most tokens (prompt and completion) the model takes.
        max_new_tokens: of the job; a prompt must leave room for them.
    """
    tokenized: list[TokenizedPrompt] = []
    errors: list[str] = []
    for prompt in prompts:
        if prompt.messages is None:
            text = prompt.text or ""
        else:
            try:
                text = render_chat([{"role": role, "content": content} for role, content in prompt.messages])
            except ValueError as error:
                errors.append(f"{prompt.origin}: the chat cannot be rendered: {error}")
                continue
        tokens = encode(text, prompt.messages is None)
        if not tokens:
            errors.append(f"{prompt.origin}: has no tokens")
        elif len(tokens) + max_new_tokens > context:
            errors.append(
                f"{prompt.origin}: prompt of {len(tokens)} tokens + {max_new_tokens} new ones must fit the "
                f"model's context of {context}, got {len(tokens) + max_new_tokens}"
            )
        tokenized.append(TokenizedPrompt(prompt_id=prompt.prompt_id, text=text, tokens=tuple(tokens)))
    if errors:
        raise PromptError("\n".join(errors[:_SHOWN_ERRORS]))
    return tokenized


def _jsonl_rows(data: bytes, name: str) -> Iterator[tuple[int, Any]]:
    for line, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            yield line, json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            yield line, ValueError(f"is not UTF-8 (byte {error.start} of the line)")
        except json.JSONDecodeError as error:
            yield line, ValueError(f"is not JSON: {error.msg} at column {error.colno}")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise PromptError(f"{path}: is not a Parquet file: {error}") from error
    if not {"prompt", "messages"} & set(table.column_names):
        raise PromptError(f"{path}: must have a column prompt or messages, got {table.column_names}")
    # A Parquet column exists for every row: a null stands for "not given".
    rows = ({key: value for key, value in row.items() if value is not None} for row in table.to_pylist())
    return enumerate(rows, start=1)


def _parse(row: Any, line: int, name: str, stem: str) -> Prompt:
    if isinstance(row, ValueError):
        raise row
    if not isinstance(row, Mapping):
        raise ValueError(f"must be an object with prompt or messages, got {type(row).__name__}")
    prompt_id = row.get("id", f"{stem}:{line}")
    if not isinstance(prompt_id, (str, int)) or isinstance(prompt_id, bool):
        raise ValueError(f"id must be text or a whole number, got {prompt_id!r}")
    if ("prompt" in row) == ("messages" in row):
        raise ValueError(
            f"must have exactly one of prompt and messages, got the keys {sorted(map(str, row))}"
        )
    origin = f"{name}:{line}"
    if "prompt" in row:
        text = row["prompt"]
        if not isinstance(text, str) or not text:
            raise ValueError(f"prompt must be a text that is not empty, got {text!r}")
        if not _encodable(text):
            raise ValueError(f"prompt must be valid Unicode, got {text!r}")
        return Prompt(prompt_id=str(prompt_id), origin=origin, text=text)
    return Prompt(prompt_id=str(prompt_id), origin=origin, messages=_messages(row["messages"]))


def _messages(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages must be a list that is not empty, got {value!r}")
    messages = []
    for index, message in enumerate(value):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"messages[{index}] must have the texts role and content, got {message!r}")
        if not _encodable(role + content):
            raise ValueError(f"messages[{index}] must be valid Unicode, got {message!r}")
        messages.append((role, content))
    return tuple(messages)


def _encodable(text: str) -> bool:
    """False for lone surrogates, which JSON can spell and no tokenizer can take."""
    return all(not 0xD800 <= ord(char) <= 0xDFFF for char in text)

"""Prompts: the packaged dozen, and what is said about files that are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_attn_plugin.launch.errors import PromptError
from rl_attn_plugin.launch.prompts import Prompt, TokenizedPrompt, read_prompts, tokenize_prompts


def _file(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    )
    return path


def test_packaged_prompts_are_a_varied_dozen() -> None:
    prompts = read_prompts(None)
    assert len(prompts) == 12
    assert len({prompt.prompt_id for prompt in prompts}) == 12
    assert {prompt.messages is None for prompt in prompts} == {True, False}


def test_jsonl_takes_text_and_chats(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        b"\xef\xbb\xbf" + json.dumps({"prompt": "Once"}).encode(),
        b"",
        {"id": "chat", "messages": [{"role": "user", "content": "Grüße"}], "extra": 1},
    )
    first, second = read_prompts(path)
    assert (first.prompt_id, first.text, first.messages) == ("p:1", "Once", None)
    assert (second.prompt_id, second.text, second.messages) == ("chat", None, (("user", "Grüße"),))
    assert second.origin == f"{path}:3"
    assert len(read_prompts(path, 1)) == 1


def test_parquet_takes_text_and_chats(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    chat = [{"role": "user", "content": "Hi"}]
    pq.write_table(pa.table({"prompt": ["Once", None], "messages": [None, chat], "id": ["a", None]}), path)
    first, second = read_prompts(path)
    assert (first.prompt_id, first.text) == ("a", "Once")
    assert (second.prompt_id, second.messages) == ("p:2", (("user", "Hi"),))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json", "p.jsonl:2: is not JSON"),
        (b"\xff\xfe", "p.jsonl:2: is not UTF-8"),
        (["list"], "p.jsonl:2: must be an object with prompt or messages, got list"),
        ({"text": "x"}, r"p.jsonl:2: must have exactly one of prompt and messages, got the keys \['text'\]"),
        ({"prompt": "x", "messages": []}, "p.jsonl:2: must have exactly one of prompt and messages"),
        ({"prompt": ""}, "p.jsonl:2: prompt must be a text that is not empty, got ''"),
        ({"prompt": 7}, "p.jsonl:2: prompt must be a text that is not empty, got 7"),
        ({"messages": []}, "p.jsonl:2: messages must be a list that is not empty"),
        ({"messages": [{"role": "user"}]}, r"p.jsonl:2: messages\[0\] must have the texts role and content"),
        ({"id": [1], "prompt": "x"}, r"p.jsonl:2: id must be text or a whole number, got \[1\]"),
        ({"id": "p:1", "prompt": "x"}, "p.jsonl:2: id 'p:1' is already that of line 1"),
        ({"prompt": "lone \ud800 surrogate"}, "p.jsonl:2: prompt must be valid Unicode"),
        (
            {"messages": [{"role": "user", "content": "\udfff"}]},
            r"p.jsonl:2: messages\[0\] must be valid Unicode",
        ),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: Any, message: str) -> None:
    path = _file(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(PromptError, match=message):
        read_prompts(path)


def test_all_bad_lines_are_listed_up_to_five(tmp_path: Path) -> None:
    path = _file(tmp_path, *[{"prompt": ""}] * 7)
    with pytest.raises(PromptError) as caught:
        read_prompts(path)
    assert str(caught.value).count("p.jsonl:") == 5
    assert "(and 2 more)" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "absent.jsonl", "no such prompts file"),
        (b"", "empty.jsonl", "holds no prompts"),
        (b"\n  \n", "blank.jsonl", "holds no prompts"),
        (b"PAR1 not really", "bad.parquet", "is not a Parquet file"),
    ],
)
def test_unusable_files(tmp_path: Path, content: Any, name: str, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PromptError, match=message):
        read_prompts(path)


def test_folder_and_parquet_without_columns(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="must be a JSONL or Parquet file, got a folder"):
        read_prompts(tmp_path)
    pq.write_table(pa.table({"question": ["x"]}), tmp_path / "q.parquet")
    with pytest.raises(PromptError, match=r"must have a column prompt or messages, got \['question'\]"):
        read_prompts(tmp_path / "q.parquet")


def _tokenize(prompts: Iterable[Prompt], context: int = 10, max_new_tokens: int = 4) -> list[TokenizedPrompt]:
    def render(messages: list[dict[str, str]]) -> str:
        if messages[0]["role"] == "tool":
            raise ValueError("no such role")
        return "".join(message["content"] for message in messages)

    return tokenize_prompts(
        prompts, encode=lambda text, raw: [ord(c) for c in text.strip()], render_chat=render, context=context,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip


def test_tokenized_in_order(tmp_path: Path) -> None:
    path = _file(tmp_path, {"prompt": "ab"}, {"messages": [{"role": "user", "content": "c"}]})
    first, second = _tokenize(read_prompts(path))
    assert (first.text, first.tokens, second.text, second.tokens) == ("ab", (97, 98), "c", (99,))


def test_context_is_a_hard_limit_and_exactly_that(tmp_path: Path) -> None:
    assert len(_tokenize(read_prompts(_file(tmp_path, {"prompt": "123456"})))[0].tokens) == 6
    with pytest.raises(
        PromptError, match=r"p.jsonl:1: prompt of 7 tokens \+ 4 new ones must fit .* context of 10, got 11"
    ):
        _tokenize(read_prompts(_file(tmp_path, {"prompt": "1234567"})))


def test_unrenderable_and_empty_prompts(tmp_path: Path) -> None:
    path = _file(tmp_path, {"messages": [{"role": "tool", "content": "x"}]}, {"prompt": " "})
    with pytest.raises(
        PromptError, match=r"p.jsonl:1: the chat cannot be rendered: no such role\n.*p.jsonl:2: has no tokens"
    ):
        _tokenize(read_prompts(path))

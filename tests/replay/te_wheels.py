"""TransformerEngine's real merge helpers, without a GPU: the unmodified file out of the released wheel.

The wheel is pure Python, but importing it loads CUDA libraries. So one file of it is imported, the one that holds the
helpers, while every other module of TransformerEngine is answered by a stand-in that holds nothing. Only what the file
says at import time touches the stand-ins; the helpers use torch alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_HELPERS = (
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
    "transformer_engine.pytorch.attention",
)


def wheel(version: str) -> Path:
    """The wheel of one release, from the package index through pip, once; skips where there is none.

    A skipped comparison with the real thing must not pass for one that was made: with ``CI`` set it fails instead.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("RL_ATTN_CACHE") or Path(home) / "rl_attn_plugin") / "te-wheels"
    name = f"transformer_engine-{version}-py3-none-any.whl"
    if (folder / name).is_file():
        return folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--retries", "1", "--no-deps", "--only-binary", ":all:", "--dest", scratch]
        command += [f"transformer-engine=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if done.returncode or not (Path(scratch) / name).is_file():
            last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            reason = (
                f"NOT COMPARED with the real TransformerEngine {version}: no wheel from the index ({last})"
            )
            (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
        (Path(scratch) / name).replace(folder / name)  # atomic: a file under the final name is complete
    return folder / name


class _Meta(type):
    """Any attribute, any call and any subscript of a stand-in is a stand-in."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        return _Nothing

    def __getitem__(cls, key: object) -> Any:
        return _Nothing


class _Nothing(metaclass=_Meta):
    """A class, so that the file may derive from it and use it in annotations."""


class _Finder:
    """Finds the one real file inside the wheel, and stand-ins for the rest of TransformerEngine."""

    def __init__(self, wheel: Path, real: str, jit_fuser: Callable[..., Any]) -> None:
        self._wheel, self._real, self._jit_fuser = wheel, real, jit_fuser

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == self._real:
            return PathFinder.find_spec(name, [str(self._wheel.joinpath(*name.split(".")[:-1]))])
        if name.split(".")[0] in ("transformer_engine", "transformer_engine_torch"):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(_Nothing, name)  # type: ignore[method-assign]
        if spec.name == "transformer_engine.pytorch.jit":
            module.jit_fuser = self._jit_fuser  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def without_te() -> Iterator[None]:
    """No module of TransformerEngine is loaded inside; what was loaded before is back afterwards."""

    def loaded() -> dict[str, ModuleType]:
        mine = ("transformer_engine", "transformer_engine_torch")
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] in mine}

    before = loaded()
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)


@contextmanager
def installed(version: str, jit_fuser: Callable[..., Any] = lambda f: f) -> Iterator[None]:
    """As if this release were installed, as far as its merge helpers and its version go.

    Args:
        version: of the release.
        jit_fuser: what TransformerEngine decorates the helpers with; by default they stay plain functions.
    """
    path = wheel(version)
    with zipfile.ZipFile(path) as archive:
        inside = set(archive.namelist())
    real = next(name for name in _HELPERS if f"{name.replace('.', '/')}.py" in inside)
    finder = _Finder(path, real, jit_fuser)
    with without_te():
        sys.meta_path.insert(0, finder)
        sys.path.insert(0, str(path))  # for its version: importlib.metadata reads wheels
        try:
            yield
        finally:
            sys.path.remove(str(path))
            sys.meta_path.remove(finder)

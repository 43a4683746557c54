"""The repository's shape: links, public names, and what kernels may not do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib

import rl_attn_plugin

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["integrations", "launch"])
def test_edges_are_relative_links(name: str) -> None:
    link = ROOT / "rl_attn_plugin" / name
    assert link.is_symlink() and link.readlink() == Path("..") / name
    assert (ROOT / name / "__init__.py").is_file()


def test_every_folder_with_modules_is_a_package() -> None:
    """`packages.find` leaves out a folder without __init__.py, and says nothing."""
    for top in ("rl_attn_plugin", "integrations", "launch"):
        for module in (ROOT / top).rglob("*.py"):
            assert (module.parent / "__init__.py").is_file(), module.parent


def test_public_names() -> None:
    assert rl_attn_plugin.__all__ == [
        "AttentionOutput",
        "FlashAttention",
        "Impl",
        "PagedPlan",
        "Rope",
        "Schedule",
        "apply_rope",
        "batch_invariant",
        "capture_attention_inputs",
        "flash_attention",
        "flash_attention_paged",
        "flash_attention_varlen",
        "merge_attention",
        "plan_paged",
        "swap_attention",
        "write_kv_cache",
    ]
    assert all(hasattr(rl_attn_plugin, name) for name in rl_attn_plugin.__all__)


def test_kernels_hold_nothing_that_makes_bits_depend_on_a_run() -> None:
    banned = re.compile(r"tl\.atomic_add|tl\.atomic_xchg|triton\.autotune|make_block_ptr")
    for module in (ROOT / "rl_attn_plugin" / "kernels").rglob("*.py"):
        assert not banned.search(module.read_text(encoding="utf-8")), module


def test_pins_cover_what_make_installs() -> None:
    """A requirement without a pin would be another version tomorrow."""
    pins = {
        re.split(r"[=<>]", line)[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(r for e in ("ray", "transformers", "test", "docs", "dev") for r in extras[e]),
    ]
    names = {re.split(r"[\[=<>;]", r)[0].strip().lower().replace("_", "-") for r in wanted} - {
        "rl-attn-plugin"
    }
    assert names <= pins, names - pins

"""Importing the package needs torch alone, and hardly any time beyond it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_BLOCKED = (
    "import sys\n"
    "class Blocked:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.split('.')[0] in {'ray', 'transformers', 'pyarrow', 'rich', 'tyro', 'jinja2', 'plotly',\n"
    "                                  'transformer_engine'}:\n"
    "            raise ModuleNotFoundError('blocked: ' + name, name=name)\n"
    "        if name.split('.')[0] == 'triton' and armed:\n"
    "            raise ModuleNotFoundError('blocked: ' + name, name=name)\n"
    "armed = False\n"
    "sys.meta_path.insert(0, Blocked())\n"
    "import torch\n"  # torch itself may import triton
    "armed = True\n"
)


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_is_all_it_needs() -> None:
    out = fresh(
        _BLOCKED
        + "import rl_attn_plugin as p\n"
        + "x = torch.randn(1, 5, 2, 16)\n"
        + "print(p.flash_attention(x, x, x).out.shape)\n"
    )
    assert "[1, 5, 2, 16]" in out


def test_the_harness_needs_torch_alone() -> None:
    code = "from rl_attn_plugin.replay import compare_attention, synthetic_inputs\n"
    out = fresh(_BLOCKED + code + "print(compare_attention(synthetic_inputs(length=40)).verdict)\n")
    assert "PASS" in out


def test_it_imports_fast() -> None:
    """Best of three fresh processes: under 0.3 s beyond torch."""
    code = (
        "import time, torch; t = time.perf_counter(); import rl_attn_plugin; print(time.perf_counter() - t)"
    )
    assert min(float(fresh(code)) for _ in range(3)) < 0.3


@pytest.mark.parametrize(
    "module", ["integrations.transformers", "launch.job", "report", "drift", "replay", "monitor"]
)
def test_the_edges_import_the_same_way(module: str) -> None:
    fresh(f"import importlib; importlib.import_module('rl_attn_plugin.{module}')")


def test_a_missing_extra_is_named() -> None:
    code = (
        _BLOCKED.replace("'tyro', ", "'none', ").replace("'rich', ", "")
        + "from rl_attn_plugin.cli import main\nprint(main(['parity', '--out', '/nonexistent/x']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'rl-attn-plugin[" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr

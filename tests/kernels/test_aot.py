"""Every kernel compiles for every architecture that is promised, on a machine without any of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton's compiler")
SCRIPT = Path(__file__).with_name("aot.py")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_compile_ahead_of_time(target: str, tmp_path: Path) -> None:
    # a process of its own: this one may run the interpreter, in which nothing compiles
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    done = subprocess.run([sys.executable, SCRIPT, target], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) >= 25
    if target == "sm_90":
        tensor_cores = [x for x in lines if ("forward" in x or "backward" in x) and "fp32" not in x]
        assert tensor_cores and all("wgmma" in x for x in tensor_cores), done.stdout

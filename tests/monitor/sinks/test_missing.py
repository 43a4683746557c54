"""Without the libraries: the package imports, and a sink says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pyarrow", "prometheus_client", "tensorboard", "wandb", "mlflow"}:
            raise ModuleNotFoundError("blocked: " + name, name=name)

sys.meta_path.insert(0, Blocked())
from rl_attn_plugin.monitor.sinks import *
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT + code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("made", "library"),
    [
        ("ParquetSink('x')", "pyarrow"),
        ("TensorBoardSink('x')", "tensorboard"),
        ("PrometheusSink(0)", "prometheus_client"),
        ("WandbSink()", "wandb"),
        ("MlflowSink()", "mlflow"),
    ],
)
def test_a_missing_library_is_named(made: str, library: str) -> None:
    said = run(f"try:\n    {made}\nexcept ImportError as error:\n    print(error)\n")
    assert said == f"this sink needs {library}: pip install 'rl-attn-plugin[monitor]'\n"


def test_lines_need_no_library() -> None:
    assert run("JsonLinesSink('/dev/null').close(); print('written')") == "written\n"


def test_importing_loads_none_of_them() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import rl_attn_plugin.monitor.sinks\n"
        "print({name.split('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = {"pyarrow", "prometheus_client", "tensorboard", "wandb", "mlflow", "pandas"}
    assert not loaded & set(done.stdout.replace("'", " ").replace(",", " ").split()), done.stdout

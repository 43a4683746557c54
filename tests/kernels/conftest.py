"""The kernels run on a GPU, or in Triton's interpreter on CPU; without either their tests say so and skip."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False")
    no_device = pytest.mark.skip(reason="needs a GPU or TRITON_INTERPRET=1 in the environment")
    for item in items:
        if "tests/kernels" not in item.path.as_posix():
            continue
        if item.get_closest_marker("gpu") and (not GPU or INTERPRET):
            item.add_marker(no_gpu)
        elif item.path.name != "test_aot.py" and not (GPU or INTERPRET):
            item.add_marker(no_device)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if GPU and not INTERPRET else "cpu")

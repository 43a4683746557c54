"""The run that most tests read."""

from __future__ import annotations

import numpy as np
import pytest

from tests.offline.runs import Sample


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(7)
    return [Sample(rng, step, number) for step in range(3) for number in range(60)]

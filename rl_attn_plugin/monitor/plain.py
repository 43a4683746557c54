"""Numbers for strict JSON, which knows no NaN and no infinity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """JSON values alone: NaN and infinities become the strings ``nan``, ``inf`` and ``-inf``, at any depth."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

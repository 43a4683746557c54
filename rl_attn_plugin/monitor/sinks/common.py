"""What sinks share."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rl_attn_plugin.monitor.monitor import DriftMonitor
from rl_attn_plugin.monitor.plain import plain
from rl_attn_plugin.monitor.watch import Judgement
from rl_attn_plugin.monitor.worst import DriftedToken

_Self = TypeVar("_Self", bound="Closing")

TOKEN_COLUMNS = ("dlogp", "logp_trainer", "logp_rollout", "sequence", "position", "token_id", "text")
"""Fields of a worst token that a table shows."""

OCTAVES = (0.0, *(2.0**k for k in range(-24, 5)), math.inf)
"""Upper bounds of bins for abs(dlogp), nats: exact zeros, a factor of two each from 2^-24 (half a float32 step at 1 nat) to
2^4 (a factor of nine million in probability), and what is beyond."""


class Closing:
    """A sink that ``with`` closes."""

    def close(self) -> None:
        """Writes what is left and lets go of files, servers and runs. Twice is once."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load(module: str) -> Any:
    """A module of an optional library.

    Raises:
        ImportError: the library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f"this sink needs {error.name}: pip install 'rl-attn-plugin[monitor]'") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Lets an OSError say which path it is about and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"cannot write {path} ({reason}): pass a path that this process may write to"
        raise OSError(error.errno, message) from error


def record(judgement: Judgement, worst: list[DriftedToken]) -> dict[str, Any]:
    """A step as JSON values."""
    alerts = [
        {
            "metric": alert.rule.metric,
            "bound": alert.rule.bound,
            "below": alert.rule.below,
            "window": alert.rule.window,
            "value": alert.value,
            "message": str(alert),
        }
        for alert in judgement.alerts
    ]
    found: dict[str, Any] = plain(
        {
            "step": judgement.step,
            "verdict": judgement.verdict,
            "reasons": judgement.reasons,
            "metrics": judgement.metrics,
            "firing": judgement.firing,
            "alerts": alerts,
            "diagnoses": [dataclasses.asdict(diagnosis) for diagnosis in judgement.diagnoses],
            "worst": [dataclasses.asdict(token) for token in worst],
        }
    )
    return found


def token_row(token: DriftedToken) -> list[Any]:
    """Values under `TOKEN_COLUMNS`."""
    return [getattr(token, column) for column in TOKEN_COLUMNS]


def octaves(monitor: DriftMonitor) -> list[int]:
    """Tokens in each bin of `OCTAVES`: abs(dlogp) below its bound and not below the one before."""
    edges, positive, negative = monitor.histogram()
    counts = [0] * len(OCTAVES)
    counts[0] = positive[0] + negative[0]
    at = 1
    for i in range(1, len(edges)):
        while edges[i] > OCTAVES[at]:
            at += 1
        counts[at] += positive[i] + negative[i]
    return counts

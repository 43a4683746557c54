"""Weights & Biases."""

from __future__ import annotations

import math
from typing import Any

from rl_attn_plugin.monitor.monitor import DriftMonitor
from rl_attn_plugin.monitor.sinks.common import OCTAVES, TOKEN_COLUMNS, Closing, load, octaves, token_row
from rl_attn_plugin.monitor.watch import Judgement
from rl_attn_plugin.monitor.worst import Tokenizer


class WandbSink(Closing):
    """Logs ``drift/<metric>``, ``drift/verdict``, the histogram ``drift/abs_dlogp`` (in log2 of nats) and the table
    ``drift/worst`` over ``drift/step``, an axis of its own: the run's own step counts calls of `log`.

    Attributes:
        run: that is logged to.
    """

    def __init__(self, run: Any = None, *, commit: bool = True) -> None:
        """
        Args:
            run: a `wandb.Run`, which stays open; None makes one (settings as for `wandb.init()`), which `close` finishes.
            commit: False adds a step's numbers to the row that the trainer's next `log` ends. For trainers that call
                `log` more than once with the same ``step=``, whose later calls would otherwise come too late; a trainer
                that does not log at every step then loses steps.

        Raises:
            ImportError: wandb is missing.
        """
        self._wandb = load("wandb")
        self._ours = run is None
        self._commit = commit
        self.run: Any = self._wandb.init() if run is None else run
        self.run.define_metric("drift/step")
        self.run.define_metric("drift/*", step_metric="drift/step")

    def write(
        self, judgement: Judgement, monitor: DriftMonitor, *, tokenizer: Tokenizer | None = None
    ) -> None:
        """Logs a step."""
        row: dict[str, Any] = {f"drift/{name}": value for name, value in judgement.metrics.items()}
        row |= {"drift/step": judgement.step, "drift/verdict": judgement.verdict}
        counts = octaves(monitor)
        if any(counts):
            row["drift/abs_dlogp"] = self._wandb.Histogram(np_histogram=_log2(counts))
        worst = monitor.worst(tokenizer)
        if worst:
            table = [token_row(token) for token in worst]
            row["drift/worst"] = self._wandb.Table(columns=list(TOKEN_COLUMNS), data=table)
        self.run.log(row, commit=self._commit)

    def close(self) -> None:
        """Finishes the run, if this sink made it."""
        if self._ours:
            self.run.finish()
            self._ours = False


def _log2(counts: list[int]) -> tuple[list[int], list[float]]:
    """Counts and edges of a histogram over log2(abs(dlogp)). Exact zeros are in the lowest bin, what is beyond the last
    power of two in the highest."""
    exponents = [math.log2(bound) for bound in OCTAVES[1:-1]]
    edges = [exponents[0] - 1, *exponents, exponents[-1] + 1]
    return [counts[0] + counts[1], *counts[2:]], edges

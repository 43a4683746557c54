"""MLflow."""

from __future__ import annotations

import time
from typing import Any

from rl_attn_plugin.monitor.monitor import DriftMonitor
from rl_attn_plugin.monitor.sinks.common import Closing, load, record
from rl_attn_plugin.monitor.watch import Judgement
from rl_attn_plugin.monitor.worst import Tokenizer

_AT_ONCE = 1000  # metrics that MLflow takes in one call


class MlflowSink(Closing):
    """Logs ``drift/<metric>`` at each step, the last verdict as the tag ``drift.verdict``, and what is no number as the
    artifact ``drift/step-00000012.json``.

    Attributes:
        run_id: that is logged to.
    """

    def __init__(self, run_id: str | None = None) -> None:
        """
        Args:
            run_id: of a run, which stays open; None takes the active run, or makes one, which `close` ends. Server and
                experiment are MLflow's own settings.

        Raises:
            ImportError: mlflow is missing.
        """
        self._mlflow = load("mlflow")
        self._entities = load("mlflow.entities")
        self._client: Any = self._mlflow.MlflowClient()
        active = self._mlflow.active_run()
        self._ours = run_id is None and active is None
        if run_id is not None:
            self.run_id = str(self._client.get_run(run_id).info.run_id)  # an unknown one is found out now
        elif active is not None:
            self.run_id = str(active.info.run_id)
        else:
            self.run_id = str(self._mlflow.start_run().info.run_id)

    def write(
        self, judgement: Judgement, monitor: DriftMonitor, *, tokenizer: Tokenizer | None = None
    ) -> None:
        """Logs a step."""
        now = int(time.time() * 1000)  # ms, as MLflow wants
        metrics = [
            self._entities.Metric(f"drift/{name}", value, now, judgement.step)
            for name, value in judgement.metrics.items()
        ]
        tag = self._entities.RunTag("drift.verdict", judgement.verdict)
        for start in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self.run_id, metrics[start : start + _AT_ONCE])
        self._client.log_batch(self.run_id, tags=[tag])
        said = record(judgement, monitor.worst(tokenizer))
        del said["metrics"]
        self._client.log_dict(self.run_id, said, f"drift/step-{judgement.step:08d}.json")

    def close(self) -> None:
        """Ends the run, if this sink made it."""
        if self._ours:
            self._ours = False
            active = self._mlflow.active_run()
            if active is not None and active.info.run_id == self.run_id:
                self._mlflow.end_run()  # or the thread's next run would not start
            else:
                self._client.set_terminated(self.run_id)

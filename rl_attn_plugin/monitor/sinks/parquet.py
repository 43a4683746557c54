"""A folder with one Parquet file per step."""

from __future__ import annotations

from pathlib import Path

from rl_attn_plugin.monitor.monitor import DriftMonitor
from rl_attn_plugin.monitor.sinks.common import Closing, load, naming
from rl_attn_plugin.monitor.watch import Judgement
from rl_attn_plugin.monitor.worst import Tokenizer


class ParquetSink(Closing):
    """Writes ``step-00000012.parquet`` with the columns step (int64), metric (string) and value (float64), a row per metric.

    A file has its name only once it is whole. A step that is written again replaces its file.
    """

    def __init__(self, folder: str | Path) -> None:
        """
        Args:
            folder: is made.

        Raises:
            ImportError: pyarrow is missing.
            OSError: the folder cannot be made.
        """
        self._arrow, self._parquet = load("pyarrow"), load("pyarrow.parquet")
        self.folder = Path(folder)
        with naming(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def write(
        self, judgement: Judgement, monitor: DriftMonitor, *, tokenizer: Tokenizer | None = None
    ) -> None:
        """Writes a step's file.

        Raises:
            OSError: it cannot be written.
        """
        pa = self._arrow
        names, values = list(judgement.metrics), list(judgement.metrics.values())
        table = pa.table(
            {
                "step": pa.array([judgement.step] * len(names), pa.int64()),
                "metric": pa.array(names, pa.string()),
                "value": pa.array(values, pa.float64()),
            }
        )
        path = self.folder / f"step-{judgement.step:08d}.parquet"
        temporary = path.with_name(f".{path.name}.tmp")  # a dot, so that readers of the folder pass it over
        with naming(path):
            self._parquet.write_table(table, temporary)
            temporary.replace(path)

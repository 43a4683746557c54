"""TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_attn_plugin.monitor.monitor import DriftMonitor
from rl_attn_plugin.monitor.sinks.common import TOKEN_COLUMNS, Closing, load, naming, token_row
from rl_attn_plugin.monitor.watch import Judgement
from rl_attn_plugin.monitor.worst import DriftedToken, Tokenizer

_SHOWN = 10


class TensorBoardSink(Closing):
    """Scalars ``drift/<metric>``, the histogram ``drift/abs_dlogp``, and the texts ``drift/verdict`` and ``drift/worst``."""

    def __init__(self, folder: str | Path) -> None:
        """
        Args:
            folder: of the run, as for TensorBoard's ``--logdir`` or below it.

        Raises:
            ImportError: tensorboard is missing.
            OSError: the folder cannot be written.
        """
        writer = load("torch.utils.tensorboard").SummaryWriter
        self.folder = Path(folder)
        with naming(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer: Any = writer(str(self.folder))

    def write(
        self, judgement: Judgement, monitor: DriftMonitor, *, tokenizer: Tokenizer | None = None
    ) -> None:
        """Writes a step and flushes it."""
        step = judgement.step
        for name, value in judgement.metrics.items():
            self._writer.add_scalar(f"drift/{name}", value, step)
        if judgement.metrics["tokens/compared"]:
            self._writer.add_histogram_raw(
                "drift/abs_dlogp", **_histogram(judgement, monitor), global_step=step
            )
        verdict = f"**{judgement.verdict}**\n\n" + "\n".join(f"- {reason}" for reason in judgement.reasons)
        self._writer.add_text("drift/verdict", verdict, step)
        worst = monitor.worst(tokenizer)[:_SHOWN]
        if worst:
            self._writer.add_text("drift/worst", _table(worst), step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


def _histogram(judgement: Judgement, monitor: DriftMonitor) -> dict[str, Any]:
    """Arguments of `add_histogram_raw`: the monitor's bins from the first to the last that hold tokens."""
    metrics = judgement.metrics
    edges, positive, negative = monitor.histogram()
    counts = [a + b for a, b in zip(positive, negative, strict=True)]
    held = [i for i, count in enumerate(counts) if count]
    first, last = held[0], held[-1] + 1
    n = metrics["tokens/compared"]
    return {
        "min": edges[max(first - 1, 0)],  # the monitor keeps no smallest value; this is within a bin of it
        "max": metrics["dlogp/abs_max"],
        "num": int(n),
        "sum": metrics["dlogp/abs_mean"] * n,
        "sum_squares": metrics["dlogp/rms"] ** 2 * n,
        "bucket_limits": edges[first:last],
        "bucket_counts": counts[first:last],
    }


def _table(tokens: list[DriftedToken]) -> str:
    """Tokens as a Markdown table."""
    rows = [[_cell(value) for value in token_row(token)] for token in tokens]
    lines = [list(TOKEN_COLUMNS), ["---"] * len(TOKEN_COLUMNS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: float | int | str | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    # repr shows white space; the cell would end at | and the code at a backtick
    return "`" + repr(value).replace("|", "\\x7c").replace("`", "\\x60") + "`"

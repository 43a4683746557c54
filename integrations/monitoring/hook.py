"""What every loop does at the end of a step: reduce over ranks, judge, write, forget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from rl_attn_plugin.monitor import DriftError, DriftMonitor, Judgement, Watch
from rl_attn_plugin.monitor.worst import Tokenizer


class Sink(Protocol):
    """Where a step's numbers go: those of `rl_attn_plugin.monitor.sinks`, or your own."""

    def write(
        self, judgement: Judgement, monitor: DriftMonitor, *, tokenizer: Tokenizer | None = None
    ) -> None:
        """Called at the end of each step, with the monitor of all ranks."""


class DriftHook:
    """A monitor, its verdicts and its outlets, held together over the steps of a training.

    Attributes:
        monitor: of the running step; `update` is called by the hooks of this package, or by you.
        last: what the last step said; None before the first.
        steps: that were judged.
    """

    def __init__(
        self,
        monitor: DriftMonitor | None = None,
        *,
        watch: Watch | None = None,
        sinks: Sequence[Sink] = (),
        tokenizer: Tokenizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            monitor: with the groups and bounds that you want; a plain one if None.
            watch: rules; the default ones if None.
            sinks: written to at the end of each step, on rank 0 of the group.
            tokenizer: for the text of the worst tokens.
            group: ranks that hold different tokens (data parallel), where not all of them do.
        """
        self.monitor = monitor if monitor is not None else DriftMonitor()
        self.watch = watch if watch is not None else Watch()
        self.sinks = tuple(sinks)
        self.tokenizer = tokenizer
        self.group = group
        self.last: Judgement | None = None
        self.steps = 0

    def end_step(self, step: int | None = None) -> Judgement:
        """Judges what the monitor has seen since the last call, on every rank alike, and starts afresh.

        Every rank of the group must call it.

        Args:
            step: of the training; counted from 1 if None.

        Raises:
            DriftError: a rule with action ``raise`` began to fire; sinks have been written by then.
        """
        self.steps += 1
        number = self.steps if step is None else step
        spread = dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1
        whole = self.monitor.all_reduce(self.group) if spread else self.monitor
        stopped: DriftError | None = None
        try:
            try:
                self.last = self.watch.judge(number, whole, tokenizer=self.tokenizer)
            except DriftError as error:  # the step that ends a run is the one to look at afterwards
                self.last, stopped = error.judgement, error
            if not spread or dist.get_rank(self.group) == 0:
                for sink in self.sinks:
                    sink.write(self.last, whole, tokenizer=self.tokenizer)
        finally:
            self.monitor.reset()
        if stopped is not None:
            raise stopped
        return self.last


def named(judgement: Judgement, prefix: str = "drift/") -> dict[str, float]:
    """A judgement's numbers for a trainer's own log; whether it drifted is 1 or 0 under ``drift/firing``."""
    found = {f"{prefix}{name}": value for name, value in judgement.metrics.items()}
    return found | {f"{prefix}firing": float(len(judgement.firing))}

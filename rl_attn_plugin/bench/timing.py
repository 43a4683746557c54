"""Medians of CUDA-event times, taken in turns so that no kernel gets the cool GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

Run = Callable[[], Any]
_PAUSE = 0.05  # seconds


def milliseconds(run: Run, *, budget_ms: float) -> float:
    """Median time of one call, over as many calls as the budget holds (at least 5)."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(3):
        run()
    end.record()
    end.synchronize()
    count = max(5, min(200, int(budget_ms / max(start.elapsed_time(end) / 3, 1e-3))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(count)] for _ in range(2)]
    for begin, done in zip(*events, strict=True):
        begin.record()
        run()
        done.record()
    torch.cuda.synchronize()
    return float(median(begin.elapsed_time(done) for begin, done in zip(*events, strict=True)))


def in_turns(runs: Mapping[str, Run], *, rounds: int, budget_ms: float) -> dict[str, float]:
    """Median over rounds of each kernel's median.

    Every round times all of them, in another order and after a pause: a kernel that reaches the power cap
    lowers the clock of the one that follows.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for n in range(rounds):
        turn = n % len(names) if names else 0
        for name in names[turn:] + names[:turn]:
            torch.cuda.synchronize()
            time.sleep(_PAUSE)
            times[name].append(milliseconds(runs[name], budget_ms=budget_ms))
    return {name: median(found) for name, found in times.items()}


def sustained(runs: Mapping[str, Run], *, rounds: int, budget_ms: float) -> dict[str, float]:
    """Mean time of each kernel launched back to back for ``budget_ms``, after as long again; median over rounds.

    What a training step sees: the device settles at its power cap, where a better kernel runs at a lower clock.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            count = max(3, int(budget_ms / milliseconds(run, budget_ms=5.0)))
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(count):
                run()
            start.record()
            for _ in range(count):
                run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / count)
    return {name: median(found) for name, found in times.items()}


def graphed(run: Run) -> Run:
    """The same call as a CUDA graph, so that a short kernel is timed and not its launch."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay

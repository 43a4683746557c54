"""Speed of the drift monitor on a CPU, live and over files.

    OMP_NUM_THREADS=1 python docs/benchmarks/monitor_cpu.py --out docs/benchmarks/monitor-cpu/monitor.json

``update`` is timed on one core; ``rl-attn drift`` reads a file a step from a temporary folder, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rl_attn_plugin import provenance
from rl_attn_plugin.monitor import DriftMonitor

_LENGTH = 1000  # tokens of a sequence


def numbers(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Trainer's and rollout's log-probs with noise as bf16 makes it."""
    rollout = -rng.exponential(1.0, count).astype(np.float32) - 1e-6
    noise = rng.standard_normal(count, dtype=np.float32) * 0.02
    return np.minimum(rollout + noise, -1e-6), rollout


def live(rounds: int) -> dict[str, Any]:
    """Positions a second of `DriftMonitor.update`, median over rounds, one core.

    ``rows``: 64 sequences of 1024, of which 80 % are active. ``packed``: as many tokens in one row, all of them active,
    with and without sequences.
    """
    count = 64 * 1024
    trainer, rollout = (torch.from_numpy(x) for x in numbers(count, np.random.default_rng(0)))
    rows = [x.view(64, 1024) for x in (trainer, rollout)]
    mask = (torch.arange(1024) < 819).float().expand(64, 1024).contiguous()
    packed = (trainer, rollout, torch.ones(count))
    layouts: dict[str, tuple[Any, dict[str, Any]]] = {
        "rows": ((*rows, mask), {}),
        "packed": (packed, {"sequence_ids": torch.arange(count) // 1024}),
        "packed, no sequences": (packed, {}),
    }
    found = {}
    for name, (given, more) in layouts.items():
        monitor = DriftMonitor()
        seconds = []
        for step in range(rounds + 1):
            began = time.perf_counter()
            monitor.update(*given, step=step, **more)
            seconds.append(time.perf_counter() - began)
        middle = float(np.median(seconds[1:]))  # the first one allocates
        found[name] = {
            "positions": count,
            "active": int(given[2].sum()),
            "seconds": seconds[1:],
            "positions_per_second": count / middle,
        }
    return found


def offline(tokens: int, steps: int) -> dict[str, Any]:
    """Seconds and peak memory of ``rl-attn drift`` over Parquet, a token a row."""
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        size = 0
        each = tokens // steps
        for step in range(steps):
            trainer, rollout = numbers(each, rng)
            sample = np.arange(each, dtype=np.int32) // _LENGTH
            table = pa.table({"sample": sample, "logp_trainer": trainer, "logp_rollout": rollout})
            path = Path(folder) / f"step_{step}.parquet"
            pq.write_table(table, path)
            size += path.stat().st_size
        program = "from rl_attn_plugin.cli import main; raise SystemExit(main())"
        command = [sys.executable, "-c", program, "drift", folder, "--out", f"{folder}/out"]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        if done.returncode not in (0, 2):
            sys.exit(done.stdout + done.stderr)
        verdict = json.loads((Path(folder) / "out" / "drift.json").read_text())
    return {
        "tokens": tokens,
        "steps": steps,
        "bytes": size,
        "seconds": seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "verdict": verdict["verdict"],
        "tokens_compared": verdict["run"]["metrics"]["tokens/compared"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--tokens", type=int, default=20_000_000, help="in the files")
    parser.add_argument("--steps", type=int, default=20, help="files")
    parser.add_argument("--rounds", type=int, default=40, help="updates that are timed")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    found = {
        "threads": torch.get_num_threads(),
        "load_before": load,
        "update": live(options.rounds),
        "offline": offline(options.tokens, options.steps),
        "provenance": {"cpu": provenance.cpu(), "versions": provenance.versions()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    say = sys.stdout.write
    say(json.dumps(found["offline"], indent=1) + "\n")
    for name, update in found["update"].items():
        say(f"update, {name}: {update['positions_per_second'] / 1e6:.1f} M positions a second\n")


if __name__ == "__main__":
    main()

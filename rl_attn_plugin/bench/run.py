"""The benchmark: cases, parity checks, times, one JSON file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rl_attn_plugin as rl
from rl_attn_plugin import provenance
from rl_attn_plugin.bench import peers
from rl_attn_plugin.bench.timing import graphed, in_turns, milliseconds, sustained
from rl_attn_plugin.replay.peers import Peer, first, flash_attention_3, importable_peers

OURS = "rl_attn_plugin"
ENDLESS = rl.Schedule(64, 1 << 20)
# Relative error (norm) against fp64 that bf16 attention may have; right kernels show about 0.0025.
TOLERANCE = 0.01
# (batch, length): from many short sequences to one long one.
DENSE = ((8, 2048), (2, 8192), (1, 8192), (1, 16384))
DECODE = ((256, 2048), (64, 8192), (8, 32768), (1, 32768), (1, 131072))
PACKED = (1024, 16384, 2048, 8192, 4096, 1024, 3072, 6144)
PAGE = 16


@dataclass(frozen=True)
class BenchConfig:
    """What to measure.

    Attributes:
        out: JSON file to write.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: D.
        rounds: times that every kernel of a case is measured, in turns.
        budget_ms: of one measurement.
        sustained_ms: of one measurement without pauses, in which the device reaches its power cap.
        only: cases to run, of forward, packed, backward, decode, merge, agreement, matmul, rows; all if empty.
    """

    out: Path = Path("bench.json")
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    rounds: int = 5
    budget_ms: float = 60.0
    sustained_ms: float = 250.0
    only: tuple[str, ...] = ()


class Bench:
    """Collects rows; a kernel whose parity check failed gets a row without a speed."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.rows: list[dict[str, Any]] = []
        self.device = torch.device("cuda")

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def inputs(self, batch: int, length: int) -> list[Tensor]:
        c = self.config
        return [self.randn(batch, length, h, c.head_dim) for h in (c.heads, c.kv_heads, c.kv_heads)]

    def measure(
        self, case: str, runs: dict[str, Callable[[], Any]], errors: dict[str, float], work: float, unit: str
    ) -> None:
        """Time what passed its check; ``work`` units (1e12) a call give the speed."""
        good = {name: run for name, run in runs.items() if errors[name] <= TOLERANCE}
        times = in_turns(good, rounds=self.config.rounds, budget_ms=self.config.budget_ms)
        steady = sustained(good, rounds=2, budget_ms=self.config.sustained_ms)
        for name in runs:
            row: dict[str, Any] = {
                "case": case,
                "kernel": name,
                "error": errors[name],
                "parity": name in good,
            }
            speed = "parity check FAILED"
            if name in good:
                row |= {"ms": times[name], unit: work / times[name] / 1e9}
                row |= {"sustained_ms": steady[name], f"sustained {unit}": work / steady[name] / 1e9}
                speed = f"{row[unit]:8.2f} {unit}, sustained {row[f'sustained {unit}']:8.2f}"
                if OURS in times:
                    row["ours_over_this"] = times[name] / times[OURS]
                    row["sustained_ours_over_this"] = steady[name] / steady[OURS]
                    speed += f"  ours/this {row['ours_over_this']:.3f} {row['sustained_ours_over_this']:.3f}"
            self.rows.append(row)
            print(f"{case:18} {name:28} {speed}", flush=True)  # noqa: T201


def _error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def _attempt(run: Callable[[], Any]) -> Any:
    """A peer's result, or None where it refuses these inputs."""
    try:
        return run()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as reason:
        print(f"  a peer refused: {str(reason).splitlines()[0][:100]}", file=sys.stderr)  # noqa: T201
        return None


def _forward(bench: Bench, batch: int, length: int) -> None:
    c = bench.config
    q, k, v = bench.inputs(batch, length)
    exact = peers.exact_tail(q[-1], k[-1], v[-1], 128, 4)
    calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        OURS: lambda q, k, v: rl.flash_attention(q, k, v).out,
        f"{OURS}, one split": lambda q, k, v: rl.flash_attention(q, k, v, schedule=ENDLESS).out,
        **peers.dense(length, c.heads, c.kv_heads, c.head_dim),
    }
    runs: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    for name, call in calls.items():
        out = _attempt(partial(call, q, k, v))
        if out is not None:
            runs[name] = partial(call, q, k, v)
            errors[name] = _error(out[-1, -128:, :4], exact)
    flops = 4 * batch * length**2 * c.heads * c.head_dim / 2
    bench.measure(f"forward {batch}x{length}", runs, errors, flops, "TFLOP/s")


def forward(bench: Bench) -> None:
    for batch, length in DENSE:
        _forward(bench, batch, length)


def packed(bench: Bench) -> None:
    c = bench.config
    cu = torch.tensor([0, *accumulate(PACKED)], dtype=torch.int32, device=bench.device)
    longest = max(PACKED)
    q, k, v = (bench.randn(sum(PACKED), h, c.head_dim) for h in (c.heads, c.kv_heads, c.kv_heads))
    bounds = cu.tolist()
    at = slice(bounds[1], bounds[2])
    exact = peers.exact_tail(q[at], k[at], v[at], 128, 4)
    calls: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: rl.flash_attention_varlen(q, k, v, cu, cu, longest, longest).out,
        **peers.packed(q, k, v, cu, longest),
    }
    runs: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    for name, call in calls.items():
        out = _attempt(call)
        if out is not None:
            runs[name], errors[name] = call, _error(out[at][-128:, :4], exact)
    flops = sum(4 * n**2 * c.heads * c.head_dim / 2 for n in PACKED)
    bench.measure("packed 1k..16k", runs, errors, flops, "TFLOP/s")


def _backward(bench: Bench, batch: int, length: int) -> None:
    c = bench.config
    q, k, v = (x.requires_grad_() for x in bench.inputs(batch, length))
    dout = bench.randn(batch, length, c.heads, c.head_dim)
    calls = {
        OURS: lambda q, k, v: rl.flash_attention(q, k, v).out,
        **peers.trainable(length),
    }
    runs: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    reference: list[Tensor] = []
    for name, call in calls.items():
        out = _attempt(partial(call, q, k, v))
        if out is None:
            continue
        runs[name] = partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True)
        grads = [x.float() for x in runs[name]()]
        # gradients are checked against fp64 in the tests; here, kernels against each other
        errors[name] = max(
            (_error(g, r.double()) for g, r in zip(grads, reference, strict=False)), default=0.0
        )
        reference = reference or grads
    if len(runs) > 1:
        errors[OURS] = min(errors[name] for name in runs if name != OURS)
    flops = 2.5 * 4 * batch * length**2 * c.heads * c.head_dim / 2
    bench.measure(f"backward {batch}x{length}", runs, errors, flops, "TFLOP/s")


def backward(bench: Bench) -> None:
    for batch, length in DENSE:
        _backward(bench, batch, length)


def _decode(bench: Bench, batch: int, length: int) -> None:
    c = bench.config
    fa3 = flash_attention_3()
    pages = length // PAGE
    k, v = (bench.randn(batch * pages, PAGE, c.kv_heads, c.head_dim) for _ in range(2))
    q = bench.randn(batch, c.heads, c.head_dim)
    table = torch.randperm(batch * pages, device=bench.device).int().view(batch, pages)
    used = torch.full((batch,), length, dtype=torch.int32, device=bench.device)
    cu = torch.arange(batch + 1, dtype=torch.int32, device=bench.device)
    rows = table[-1].long()
    exact = peers.exact_tail(q[-1:], k[rows].flatten(0, 1), v[rows].flatten(0, 1), 1, 4)

    def ours() -> Tensor:
        return rl.flash_attention_paged(q, k, v, cu, used, table, 1, length).out

    runs = {OURS: graphed(ours)}
    errors = {OURS: _error(ours()[-1:, :4], exact)}
    if fa3 is not None:
        dense = [x.view(batch, length, c.kv_heads, c.head_dim) for x in (k, v)]
        exact = peers.exact_tail(q[-1:], dense[0][-1], dense[1][-1], 1, 4)
        for splits in (0, 1):

            def theirs(splits: int = splits) -> Tensor:
                return first(
                    fa3.flash_attn_with_kvcache(
                        q[:, None], *dense, cache_seqlens=used, causal=True, num_splits=splits
                    )
                )

            name = "flash-attention-3, dense" + (", num_splits=1" if splits else "")
            errors[name] = _error(theirs()[-1, :, :4], exact)
            runs[name] = graphed(theirs)
    moved = 2 * batch * length * c.kv_heads * c.head_dim * 2
    bench.measure(f"decode {batch}x{length}", runs, errors, moved, "TB/s")


def decode(bench: Bench) -> None:
    source = torch.empty(1 << 30, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = (
        2
        * source.numel()
        / milliseconds(lambda: target.copy_(source), budget_ms=bench.config.budget_ms)
        / 1e9
    )
    bench.rows.append({"case": "copy", "kernel": "device to device", "TB/s": copy})
    print(f"{'copy':18} {'device to device':28} {copy:8.2f} TB/s", flush=True)  # noqa: T201
    for batch, length in DECODE:
        _decode(bench, batch, length)


def merge(bench: Bench) -> None:
    c = bench.config
    outs = torch.randn(8, 8192, c.heads, c.head_dim, device=bench.device)
    lses = torch.randn(8, c.heads, 8192, device=bench.device)
    weights = lses.double().softmax(0).transpose(-1, -2)[..., None]
    error = _error(rl.merge_attention(outs, lses).out, (outs * weights).sum(0))
    moved = (outs.numel() * 9 / 8 + lses.numel() * 9 / 8) * 4
    bench.measure(
        "merge 8 parts", {OURS: lambda: rl.merge_attention(outs, lses)}, {OURS: error}, moved, "TB/s"
    )


def matmul(bench: Bench) -> None:
    """The row-invariant product against cuBLAS, at the layer shapes of Qwen3-8B."""
    from rl_attn_plugin.kernels.matmul import matmul as invariant

    for rows in (1, 16, 64, 256, 1024, 4096, 16384):
        for depth, columns in ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096)):
            a, w = bench.randn(rows, depth), bench.randn(columns, depth).t()
            exact = a[-64:].double() @ w[:, :512].double()
            runs: dict[str, Callable[[], Any]] = {
                OURS: partial(invariant, a, w),
                "cuBLAS": partial(torch.mm, a, w),
            }
            errors = {name: _error(run()[-64:, :512], exact) for name, run in runs.items()}
            if rows <= 1024:
                runs = {name: graphed(run) for name, run in runs.items()}
            if rows <= 64:  # the weights are what moves
                moved = (rows * depth + depth * columns + rows * columns) * 2
                bench.measure(f"product {rows}x{depth}x{columns}", runs, errors, moved, "TB/s")
            else:
                bench.measure(
                    f"product {rows}x{depth}x{columns}", runs, errors, 2 * rows * depth * columns, "TFLOP/s"
                )


def rows(bench: Bench) -> None:
    """The row functions, in bytes that they must move."""
    from rl_attn_plugin.kernels.rows import norm, softmax

    for tokens, width in ((16384, 4096), (64, 4096), (1024, 151936)):
        x, weight = bench.randn(tokens, width), bench.randn(width)
        rms = torch.nn.functional.rms_norm
        wide = x[:64].double()
        cases: list[tuple[str, Callable[[], Tensor], Callable[[], Tensor], Tensor]] = [
            (
                "rms_norm",
                partial(norm, x, weight, None, 1e-6, center=False),  # type: ignore[list-item]
                partial(rms, x, (width,), weight, 1e-6),
                rms(wide, (width,), weight.double(), 1e-6),
            ),
            ("log_softmax", partial(softmax, x, log=True), partial(x.log_softmax, -1), wide.log_softmax(-1)),
        ]
        for name, ours, theirs, exact in cases:
            errors = {
                kernel: _error(first(run())[:64], exact) for kernel, run in ((OURS, ours), ("torch", theirs))
            }
            runs = {OURS: graphed(ours), "torch": graphed(theirs)}
            bench.measure(f"{name} {tokens}x{width}", runs, errors, 2 * x.numel() * 2, "TB/s")


def _decode_row(peer: Peer, q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
    return peer.decode(q[:, at : at + 1], k[:, : at + 1], v[:, : at + 1], None)[0]


def agreement(bench: Bench) -> None:
    """The share of rows whose decode differs from their own prefill in any bit."""
    length = 4000
    q, k, v = bench.inputs(1, length)
    cu = torch.tensor([0, 1], dtype=torch.int32, device=bench.device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=bench.device)

    def ours(at: int) -> Tensor:
        used = torch.tensor([at + 1], dtype=torch.int32, device=bench.device)
        return rl.flash_attention_paged(q[0, at : at + 1], k, v, cu, used, table, 1, length).out

    ways: dict[str, tuple[Tensor, Callable[[int], Tensor]]] = {
        OURS: (rl.flash_attention(q, k, v).out[0], ours)
    }
    for peer in importable_peers():
        ways[peer.name] = (peer.prefill(q, k, v, None)[0], partial(_decode_row, peer, q, k, v))
    places = range(16, length, 61)
    for name, (full, one) in ways.items():
        gaps = [(one(at)[0].float() - full[at].float()).abs().max().item() for at in places]
        row = {
            "case": "decode=prefill",
            "kernel": name,
            "rows": len(gaps),
            "differing": sum(g > 0 for g in gaps),
        }
        bench.rows.append(row | {"max_abs": max(gaps)})
        found = f"{row['differing']:3} of {len(gaps)} rows differ, max {max(gaps):.1e}"
        print(f"{row['case']:18} {name:28} {found}", flush=True)  # noqa: T201


CASES = {f.__name__: f for f in (forward, packed, backward, decode, merge, agreement, matmul, rows)}


def run(config: BenchConfig) -> int:
    """Measure, print a table, write JSON.

    Returns:
        0, or 1 where there is no CUDA device, a case is unknown, or our own kernel failed a parity check.
    """
    unknown = set(config.only) - CASES.keys()
    if unknown or not torch.cuda.is_available():
        reason = (
            f"unknown cases {sorted(unknown)}, choose of {sorted(CASES)}" if unknown else "no CUDA device"
        )
        print(f"rl-attn bench: {reason}", file=sys.stderr)  # noqa: T201
        return 1
    origin = provenance.collect()  # first: what cannot be told should not cost the measurements
    torch.manual_seed(0)
    bench = Bench(config)
    for name, case in CASES.items():
        if not config.only or name in config.only:
            with torch.set_grad_enabled(name == "backward"):
                case(bench)
    config.out.parent.mkdir(parents=True, exist_ok=True)
    settings = asdict(config) | {"out": config.out.name}
    content = {"config": settings, "provenance": origin, "rows": bench.rows}
    config.out.write_text(json.dumps(content, indent=1) + "\n")
    ours = [row for row in bench.rows if row["kernel"].startswith(OURS)]
    sound = all(row.get("parity", True) and not row.get("differing") for row in ours)
    return 0 if sound else 1

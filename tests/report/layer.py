"""A compared layer, and what can be wrong with it."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

from rich.console import Console

from rl_attn_plugin.replay import (
    AttentionComparisonReport,
    TensorDrift,
    Unavailable,
)
from rl_attn_plugin.replay.results import Check
from rl_attn_plugin.report.comparison import print_comparisons

HOSTILE = "</script><script>window.owned=1</script><b>&amp;\x1b[31m\u202e[bold]x[/bold]"
NOTHING = TensorDrift(None, None, None, None, None, 0, 0, 0, True)


def changed(report: AttentionComparisonReport, name: str, **fields: Any) -> AttentionComparisonReport:
    """The report with other fields in its first row of that name."""
    at = next(i for i, row in enumerate(report.drifts) if row.name == name)
    rows = list(report.drifts)
    rows[at] = replace(rows[at], **fields)
    return replace(report, drifts=rows)


def broken(report: AttentionComparisonReport) -> AttentionComparisonReport:
    """A row that lost its bits, with an infinite difference, under a hostile label."""
    out = replace(
        report["paged_kv"].out, max_abs=math.inf, infinite_count=2, differing_count=3, bit_equal=False,
        mean_abs=2e-6, mean=-1e-6, p99_abs=3e-4,
    )  # fmt: skip
    lost = changed(report, "paged_kv", out=out, check=Check("bit_equal", False, f"out differs {HOSTILE}"))
    why = [f"paged_kv: out differs {HOSTILE}"]
    return replace(lost, verdict="DRIFT", reasons=why, label=f"layer-05 {HOSTILE}")


def hostile(report: AttentionComparisonReport) -> AttentionComparisonReport:
    """Every text that comes from outside is hostile."""
    rows = [
        replace(row, name=f"{row.name} {HOSTILE}", provenance=replace(row.provenance, merge_backend=HOSTILE))
        for row in broken(report).drifts
    ]
    return replace(
        broken(report),
        drifts=rows,
        unavailable=[Unavailable(HOSTILE, HOSTILE, {"te_module": HOSTILE, HOSTILE: 1})],
        provenance={HOSTILE: HOSTILE, "gpu": {"name": HOSTILE}, "versions": {HOSTILE: HOSTILE}},
    )


def printed(reports: list[AttentionComparisonReport], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_comparisons(reports, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()

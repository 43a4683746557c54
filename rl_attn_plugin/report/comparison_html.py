"""A comparison of one layer's ways as one HTML page, under the rules of `page`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_attn_plugin.replay import AttentionComparisonReport, AttentionPathDrift
from rl_attn_plugin.report import comparison, page, words
from rl_attn_plugin.report.files import write_atomic

_PARTS = ("out", "lse", "dlogp", "q", "k")
_OPEN = 3  # layers that are shown unfolded; of more only those that did not pass


def write_comparison_html(reports: Sequence[AttentionComparisonReport], path: Path) -> None:
    """Writes the page.

    Args:
        reports: of one or several layers, at least one.
        path: where; whole or not there.

    Raises:
        ImportError: jinja2 or plotly is missing.
        OSError: it cannot be written; what was there before is still there.
        ValueError: there is no report.
    """
    write_atomic(path, render_comparison_html(reports))


def render_comparison_html(reports: Sequence[AttentionComparisonReport]) -> str:
    """The page as text.

    Args:
        reports: of one or several layers, at least one.

    Raises:
        ImportError: jinja2 or plotly is missing.
        ValueError: there is no report.
    """
    verdict = comparison.verdict_of(reports)
    try:
        import markupsafe
    except ModuleNotFoundError as error:
        raise ImportError(f"the HTML report needs {error.name}: pip install 'rl-attn-plugin[ray]'") from error

    def breakable(name: str) -> markupsafe.Markup:
        """A path's name, which may break at its joints and nowhere else."""
        text = markupsafe.escape(words.visible(name))
        for joint in "_:":
            text = text.replace(joint, markupsafe.Markup("{}<wbr>").format(joint))
        return text

    charts = [chart_rows(report) for report in reports]
    return page.render(
        "comparison",
        verdict=verdict,
        data={"layers": charts},
        draws=any(charts),
        styles=("report", "comparison"),
        filters={"breakable": breakable},
        reports=reports,
        groups=[comparison.Groups.of([report]) for report in reports],
        opened=[len(reports) <= _OPEN or report.verdict != "PASS" for report in reports],
        overview=_overview(reports),
        say=comparison,
        provenance_of=_provenance,
        absent=_absent(reports),
        machine=_machine(reports[0].provenance),
        processes=_processes(reports),
    )


def chart_rows(report: AttentionComparisonReport) -> list[dict[str, Any]]:
    """What the chart of a report draws, as plain JSON values: a row a path, in the order of the tables.

    ``state`` is ``kept``, ``lost`` or ``informs``. ``max`` is ``"inf"`` where it is infinite and None where nothing
    was compared.
    """
    groups = comparison.Groups.of([report])
    titled = (
        (f"against {report.reference_name}", groups.ways),
        ("cache in fp8", groups.fp8),
        ("rotation", groups.rotation),
        ("against fp64 merge", groups.merges),
        ("decode against own prefill", groups.peers),
    )
    return [
        {
            "group": words.visible(title),
            "name": words.visible(row.name),
            "state": "informs" if row.check is None else "kept" if row.check.passed else "lost",
            "equal": row.out.bit_equal,
            "max": "inf" if row.out.max_abs == math.inf else row.out.max_abs,
            "p99": row.out.p99_abs,
            "mean": row.out.mean_abs,
        }
        for title, rows in titled
        for row in rows
    ]


def _overview(
    reports: Sequence[AttentionComparisonReport],
) -> tuple[list[str], list[list[AttentionPathDrift | None]]]:
    """Names of all paths, and each report's row of each; the error of merges, under the same names, is left out."""
    found = []
    for report in reports:
        groups = comparison.Groups.of([report])
        rows = groups.ways + groups.fp8 + groups.rotation + groups.peers
        found.append({row.name: row for row in rows})
    names = list(dict.fromkeys(name for rows in found for name in rows))
    return names, [[rows.get(name) for name in names] for rows in found]


def _provenance(row: AttentionPathDrift) -> list[tuple[str, str]]:
    """Every number of a row in full, and how it was computed."""
    found: dict[str, Any] = {"reference": row.reference_name}
    if row.check is not None:
        found["has to be"] = f"{row.check.expectation.replace('_', '-')}: {row.check.reason}"
    for part in _PARTS:
        drift = getattr(row, part)
        if drift is not None:
            found[part] = ", ".join(f"{name} {_plain(value)}" for name, value in drift.to_dict().items())
    if row.seconds:
        found["seconds"] = f"{row.seconds:.6f}"
    return page.flat(
        found | {name: value for name, value in asdict(row.provenance).items() if value is not None}
    )


def _plain(value: Any) -> str:
    return "–" if value is None else "yes" if value is True else "no" if value is False else str(value)


def _absent(reports: Sequence[AttentionComparisonReport]) -> list[dict[str, Any]]:
    """Paths that did not run: why, in which layers, and how far an oracle got."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for report in reports:
        for missing in report.unavailable:
            entry = found.setdefault(
                (missing.name, missing.reason),
                {
                    "name": missing.name,
                    "reason": missing.reason,
                    "layers": [],
                    "te": page.flat(missing.te or {}),
                },
            )
            entry["layers"].append(report.label)
    for entry in found.values():
        if len(entry["layers"]) == len(reports):  # all of them: not worth saying
            entry["layers"] = []
    return list(found.values())


def _machine(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    """What decides bits before all else: the device and the versions that are there."""
    gpu, cpu = provenance.get("gpu"), provenance.get("cpu") or {}
    found = [("CPU", str(cpu.get("model") or "–"))]
    if gpu:
        found = [("GPU", str(gpu.get("name") or "–"))]
        found += [(name, str(gpu[key])) for name, key in (("CUDA", "cuda"), ("HIP", "hip")) if gpu.get(key)]
    versions = provenance.get("versions") or {}
    return found + [(name, str(version)) for name, version in versions.items() if version]


def _processes(reports: Sequence[AttentionComparisonReport]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Provenance of the process; of each layer's where they were not made by one."""
    found: list[tuple[str, list[tuple[str, str]]]] = []
    for report in reports:
        flat = page.flat(report.provenance)
        if flat not in [rows for _, rows in found]:
            found.append((report.label, flat))
    return found

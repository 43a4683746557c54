"""Words, terminal and files: what they say, that they fit, and that model text cannot steer them."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rl_attn_plugin.drift import DriftReport, Thresholds, summarize
from rl_attn_plugin.report import print_report, render_html, write_json
from rl_attn_plugin.report.words import number, percent, visible, zero_drift
from tests.report.factory import HOSTILE, run

ROOT = Path(__file__).resolve().parents[2]


def judged(table: object, min_tokens: int = 200) -> DriftReport:
    return summarize(
        table,
        arm_under_test="plugin",
        thresholds=Thresholds(),
        min_tokens=min_tokens,
    )


def printed(report: DriftReport, manifest: dict[str, object] | None, width: int = 100) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=width, force_terminal=False), manifest=manifest)
    return out.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.0, "0"), (0.01749, "0.0175"), (-0.5, "−0.500"), (1234, "1,234"), (12.345, "12.3"),
        (3.8e-7, "3.8e-7"), (9.99e-4, "1.0e-3"), (25_000_000, "25,000,000"), (1234.5, "1234"), (1.5e9, "1.5e9"),
        (999.7, "1000"), (123.4, "123"), (1.0, "1.00"), (0, "0"),
        (float("inf"), "∞"), (float("-inf"), "−∞"), (float("nan"), "NaN"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_signed_numbers() -> None:
    assert [number(v, signed=True) for v in (0.25, -0.25, 0.0)] == ["+0.250", "−0.250", "0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.0, "0 %"), (1.0, "100 %"), (0.424, "42 %"), (-0.12, "−12 %"), (0.9999, ">99.9 %"),
        (0.0001, "<0.1 %"), (0.004, "0.4 %"), (0.993, "99.3 %"), (-2.5, "−250 %"),
    ],
)  # fmt: skip
def test_percents_never_round_to_nothing_or_all(value: float | None, text: str) -> None:
    assert percent(value).replace("\N{NO-BREAK SPACE}", " ") == text


@given(st.text())
def test_visible_text_has_nothing_that_steers_a_terminal(text: str) -> None:
    shown = visible(text)
    assert len(shown) == len(text)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", shown)
    assert visible(shown) == shown


def test_terminal_says_what_was_measured_within_100_columns() -> None:
    table, manifest = run()
    report = judged(table)
    out = printed(report, manifest)
    assert all(len(line) <= 100 for line in out.splitlines())
    flat = " ".join(out.split())
    assert " PASS " in out and all(reason in flat for reason in report.reasons)
    assert (
        "Tokens drawn at temperature 0.8, top-p 0.95; log-probs compared at it, without truncation." in flat
    )
    assert "dlogp = logp_trainer − logp_rollout" in flat
    for arm in ("native", "plugin"):
        recorded = report.arms[arm].paths["recorded"].dlogp
        lines = [line.split() for line in out.splitlines()]
        row = " ".join(lines[lines.index([arm]) + 1])
        assert row.startswith("as recorded")
        assert number(recorded.mean_abs) in row and f"{recorded.bit_equal}/{recorded.active_count}" in row
    for step in ("full − chunked", "chunked − replay", "replay − recorded", "full − recorded"):
        assert step in out
    assert "Attention owns " in flat
    assert number(report.worst[0].dlogp, signed=True) in out


def test_the_zero_drift_arm_in_words() -> None:
    table, manifest = run()
    report = judged(table)
    assert zero_drift(report, manifest) == []
    still = replace(report.arms["plugin"].paths["recorded"].dlogp, active_count=7, bit_equal=7)
    arm = replace(
        report.arms["plugin"],
        paths={name: replace(path, dlogp=still) for name, path in report.arms["plugin"].paths.items()},
    )
    report = replace(report, arms={**report.arms, "zero-drift": arm})
    rates = {"plugin/full_prefill": 10.0, "zero-drift/full_prefill": 5.0, "plugin/decode_replay": 3.0}
    manifest = {
        **manifest,
        "timing": {"tokens_per_second": rates},
        "audit": {"trainer": {"not known": [{"operator": "aten.foo", "calls": 1}]}, "rollout": {}},
    }
    said = " ".join(zero_drift(report, manifest))
    assert "7 of 7 tokens are bit-equal" in said and "scoring takes 2.00 times as long" in said
    assert "decode takes" not in said and "Not known to be row-invariant: aten.foo." in said
    assert said in " ".join(printed(report, manifest).split())


@pytest.mark.parametrize("width", [80, 100])
def test_no_cell_of_the_tables_is_cut(width: int) -> None:
    """Even with wide numbers, and in 80 columns: what a pipe gets."""
    table, manifest = run(fault=3.0, long=8)
    out = printed(judged(table), manifest, width)
    assert "…" not in out and all(len(line) <= width for line in out.splitlines())
    rows = [line for line in out.splitlines() if re.match(r"\s+(as rec|chunked pre|decode)", line)]
    assert len(rows) == 6


def test_model_text_cannot_steer_the_terminal() -> None:
    table, manifest = run()
    texts = ["[bold red]x[/]" if i % 2 else "\x1b[31m\x07" for i in range(table.num_rows)]
    table = table.set_column(3, "text", [texts])
    manifest["model"]["name"] = "[red]name[/]\x1b[2J"
    out = printed(judged(table), manifest)
    assert "\x1b" not in out and "\x07" not in out
    assert "[bold red]x[/]" in out and "␛[31m␇" in out and "[red]name[/]␛[2J" in out


def test_terminal_of_runs_that_cannot_be_judged() -> None:
    table, _ = run()
    lacking = judged(table.filter(~((pc.field("arm") == "plugin") & (pc.field("path") == "decode_replay"))))
    out = printed(lacking, None)
    assert " INVALID " in out and "arm plugin has no tokens of path decode_replay" in out
    empty = printed(judged(table.slice(0, 0)), {})
    assert " INCONCLUSIVE " in empty and "only 0 tokens compared, 200 needed" in empty


def test_json_is_the_report(tmp_path: Path) -> None:
    report = judged(run()[0])
    write_json(report, tmp_path / "drift.json")
    data = json.loads((tmp_path / "drift.json").read_text(), parse_constant=pytest.fail)
    assert DriftReport.from_dict(data) == report
    assert [path.name for path in tmp_path.iterdir()] == ["drift.json"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow beyond 1000 bytes: the limit would stop pytest's output too."""
    for name in ("drift.json", "report.html"):
        (tmp_path / name).write_text("old")
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from rl_attn_plugin.report import write_html, write_json\n"
        "from tests.report.factory import run\n"
        "from tests.report.test_report import judged\n"
        "table, manifest = run(samples=2)\n"
        "report, folder = judged(table), Path(sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
        "for write in (lambda: write_json(report, folder / 'drift.json'),\n"
        "              lambda: write_html(report, table, manifest, folder / 'report.html')):\n"
        "    try:\n"
        "        write()\n"
        "    except OSError as error:\n"
        "        print(error.strerror)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["File too large"] * 2, done.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "drift.json": "old",
        "report.html": "old",
    }


def test_the_page_is_the_same_for_the_same_run() -> None:
    table, manifest = run(samples=3)
    assert render_html(judged(table), table, manifest) == render_html(judged(table), table, manifest)


def test_model_text_cannot_end_a_script_element() -> None:
    table, manifest = run(samples=6)
    texts = [HOSTILE if i % 2 else "<!--<script>" for i in range(table.num_rows)]
    table = table.set_column(3, "text", [texts])
    page = render_html(judged(table, 10), table, manifest)
    assert HOSTILE not in page
    (island,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert not set(island) & set("<>&")
    assert HOSTILE in json.loads(island)["arms"][0]["points"]["text"]


def test_many_points_are_thinned_and_keep_the_worst() -> None:
    table, manifest = run(long=5)
    report = judged(table)
    page = render_html(report, table, manifest)
    (island,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    points = json.loads(island)["arms"][1]["points"]
    assert points["all"] == report.arms["plugin"].paths["recorded"].dlogp.active_count > 3000
    assert len(points["dlogp"]) == len(points["text"]) == 2000
    assert max(map(abs, points["dlogp"])) == pytest.approx(abs(report.worst[0].dlogp), abs=1e-6)
    assert len(page) < 5.2e6


def test_importing_costs_no_library() -> None:
    code = (
        "import sys, rl_attn_plugin.drift, rl_attn_plugin.report\n"
        "print([m for m in ('pyarrow', 'plotly', 'jinja2', 'rich', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""A comparison in the terminal and as a page: what is shown is what was found, and nothing steers either."""

from __future__ import annotations

import io
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rl_attn_plugin.replay import AttentionComparisonReport, compare_attention, synthetic_inputs
from rl_attn_plugin.replay.results import Check
from rl_attn_plugin.report.comparison import print_comparisons
from rl_attn_plugin.report.comparison_html import place, render_comparison_html, write_comparison_html
from tests.replay.te_wheels import installed

_CHROMIUM = next(filter(None, (shutil.which(name) for name in ("chromium", "chromium-browser"))), None)
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e[bold]x"


@pytest.fixture(scope="module")
def report() -> AttentionComparisonReport:
    inputs = replace(synthetic_inputs(length=70), window=(20, -1))
    with installed("2.19.0"):
        return compare_attention(inputs, impl="torch", label="layer-03")


def broken(report: AttentionComparisonReport) -> AttentionComparisonReport:
    """A row that lost its bits, with an infinite difference, under a hostile label."""
    first = report.drifts[0]
    out = replace(first.out, max_abs=math.inf, infinite_count=2, differing_count=3, bit_equal=False)
    lost = replace(first, out=out, check=Check("bit_equal", False, "out differs in 3 of 9"))
    return replace(
        report,
        drifts=[lost, *report.drifts[1:]],
        verdict="DRIFT",
        reasons=[f"{first.name}: {HOSTILE}"],
        label=HOSTILE,
    )


def printed(reports: list[AttentionComparisonReport], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_comparisons(reports, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_says_what_was_found(report: AttentionComparisonReport, width: int) -> None:
    text = printed([report], width)
    assert "PASS" in text and "No way of computing a row changes a bit of it." in text
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    for row in report.drifts:
        assert any(line.strip().startswith(row.name[:20]) for line in text.splitlines()), row.name
    (decode,) = [line for line in text.splitlines() if line.strip().startswith("decode_replay ")]
    assert decode.split()[-1] == "bit-equal" and "equal" in decode
    for missing in report.unavailable:
        assert f"{missing.name} did not run" in text


def test_what_is_lost_is_said(report: AttentionComparisonReport) -> None:
    text = printed([report, broken(report)], 100)
    assert (
        "DRIFT" in text
        and "1 row lost what it has to keep." in text
        and "NOT bit-equal" in text
        and "∞" in text
    )
    assert "\x1b[31m" not in text and "\u202e" not in text and "[bold]x" in text


def test_the_page_is_escaped_and_alone(report: AttentionComparisonReport) -> None:
    page = render_comparison_html([report, broken(report)])
    assert "<script" not in page and "alert(1)" in page and "\u202e" not in page
    assert "default-src 'none'" in page and not re.search(r"(src|href)=\"(?!data:)", page)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", page, flags=re.S).lower().split()


def test_places_on_the_scale() -> None:
    assert place(0.0) is None and place(None) is None
    assert place(1e-9) == 0 and place(1e-12) == 0 and place(10.0) == 100 and place(math.inf) == 100
    assert place(1e-4) == 50


@pytest.mark.skipif(_CHROMIUM is None, reason="needs Chromium, none is on PATH")
@pytest.mark.parametrize("make", [lambda r: [r], lambda r: [r, broken(r)]], ids=["one", "several"])
def test_the_page_in_a_browser(
    report: AttentionComparisonReport,
    make: Callable[[AttentionComparisonReport], list[AttentionComparisonReport]],
    tmp_path: Path,
) -> None:
    from playwright.sync_api import sync_playwright

    reports = make(report)
    write_comparison_html(reports, tmp_path / "comparison.html")
    said: list[str] = []
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 700, "height": 900})
        page.on("console", lambda message: said.append(message.text))
        page.on(
            "request",
            lambda request: said.append(request.url) if not request.url.startswith("file:") else None,
        )
        page.goto((tmp_path / "comparison.html").as_uri())
        assert page.locator("h1").inner_text() == reports[-1].verdict
        assert page.locator(".ways .equal").count() == sum(d.out.bit_equal for r in reports for d in r.drifts)
        assert page.locator(".strip.lost").count() == sum(r.verdict == "DRIFT" for r in reports)
        assert page.evaluate("document.documentElement.scrollWidth") <= 700
        rows = page.locator(".ways tbody tr")
        assert rows.count() == sum(len(r.drifts) for r in reports)
        # a dot lies where its number says
        fp8 = rows.filter(has_text="fp8_kv_cache").first
        largest = report["fp8_kv_cache"].out.max_abs
        assert largest is not None
        wanted = 10 * (math.log10(largest) + 9)
        assert float(fp8.locator(".strip b").evaluate("e => parseFloat(e.style.left)")) == pytest.approx(
            wanted, abs=0.06
        )
        browser.close()
    assert said == []


def test_none_and_nothing(report: AttentionComparisonReport) -> None:
    empty = replace(
        report, drifts=[], verdict="INCONCLUSIVE", reasons=["no path that ran has anything to keep"]
    )
    assert "no path that ran" in printed([empty], 80)
    assert "no path that ran" in render_comparison_html([empty])

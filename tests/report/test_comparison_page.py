"""A comparison as a page: what is drawn is what was found, and no text becomes markup."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from rl_attn_plugin.replay import (
    AttentionComparisonReport,
    AttentionPathDrift,
)
from rl_attn_plugin.report.comparison import (
    Groups,
    differing,
    equal_bits,
    keeps,
)
from rl_attn_plugin.report.comparison_html import chart_rows, render_comparison_html, write_comparison_html
from rl_attn_plugin.report.words import largest, number
from tests.report.browser import Opened, needs_browser
from tests.report.layer import HOSTILE, NOTHING, broken, changed, hostile, printed


def test_the_page_is_escaped_and_alone(report: AttentionComparisonReport) -> None:
    page = render_comparison_html([report, hostile(report)])
    assert page.count("<script") == 3 + len(re.findall("<script", plotly())) and "\u202e" not in page
    ours = page.replace(plotly(), "")
    assert "&lt;script&gt;window.owned" in ours and "<script>window.owned" not in ours and "\x1b" not in ours
    assert "default-src 'none'; script-src 'sha256-" in html.unescape(ours) and "<b>&amp;" not in ours
    assert not re.search(r"(src|href)=\"(?!data:|#layer)", ours)


def plotly() -> str:
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text.replace("\r\n", "\n")


def test_the_charts_numbers_are_the_reports(report: AttentionComparisonReport) -> None:
    layers = [report, broken(report)]
    page = render_comparison_html(layers)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    drawn = json.loads(found.group(1), parse_constant=pytest.fail)["layers"]  # no NaN, no Infinity
    assert drawn == [chart_rows(layer) for layer in layers]
    for layer, rows in zip(layers, drawn, strict=True):
        assert len(rows) == len(layer.drifts)
        expected = {
            (r.name, "inf" if r.out.max_abs == math.inf else r.out.max_abs, r.out.p99_abs)
            for r in layer.drifts
        }
        assert {(row["name"], row["max"], row["p99"]) for row in rows} == {
            (name, most, p99) for name, most, p99 in expected
        }
    states = {row["name"]: row["state"] for row in drawn[1] if row["group"] == "against full_prefill"}
    assert (
        states["paged_kv"] == "lost"
        and states["decode_replay"] == "kept"
        and states["paged_kv_merge"] == "informs"
    )


def test_a_page_without_a_row(report: AttentionComparisonReport) -> None:
    why = ["no path that ran has anything to keep"]
    empty = replace(report, drifts=[], verdict="INCONCLUSIVE", reasons=why)
    assert why[0] in printed([empty], 80)
    page = render_comparison_html([empty])
    assert why[0] in page and len(page) < 100_000  # nothing to draw, so nothing that draws


# page in a browser


Open = Callable[..., Opened]


@pytest.fixture
def opened(open_file: Open, tmp_path: Path) -> Open:
    def make(reports: list[AttentionComparisonReport], width: int = 1280, scheme: Any = "light") -> Opened:
        path = tmp_path / "comparison.html"
        write_comparison_html(reports, path)
        return open_file(path, width, scheme)

    return make


def cells(it: Opened, table: int, row: int) -> dict[str, str]:
    """A row of a table by its headings."""
    found: dict[str, str] = it.page.evaluate(
        """([table, row]) => { const t = document.querySelectorAll("table.ways")[table];
             const heads = [...t.querySelectorAll("thead th")].map(h => h.textContent.trim());
             const cells = [...t.querySelectorAll("tbody tr")][row].children;
             return Object.fromEntries(heads.map((h, i) => [h, cells[i].textContent.trim()])); }""",
        [table, row],
    )
    return found


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (700, "dark"), (390, "light")])
def test_the_page_shows_every_row(
    report: AttentionComparisonReport, opened: Open, width: int, scheme: str
) -> None:
    it = opened([report], width, scheme)
    it.quiet_and_offline()
    header = it.page.locator("header").inner_text()
    assert header.index("Does a row’s result") < header.index("PASS") < header.index("No: every way")
    wide, inner = it.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= inner == width
    assert not re.search(r"\b(nan|undefined|none|null)\b", it.page.locator("main").inner_text(), re.I)

    groups = Groups.of([report])
    for table, rows in enumerate([groups.ways, groups.fp8, groups.rotation, groups.peers]):
        for i, row in enumerate(rows):
            shown = cells(it, table, i)
            assert shown["path"].startswith(row.name) and row.reference_name in shown["path"]
            assert shown["outmax"] == largest(row.out) and shown["outp99"] == number(row.out.p99_abs)
            assert shown["outmean"] == number(row.out.mean_abs) and shown["outdiffer"] == differing(row)
            assert shown["bit-equal"] == equal_bits(row) and shown["has to be"].startswith(keeps(row))
            if row.dlogp is not None:
                assert shown["|dlogp|mean"] == number(row.dlogp.mean_abs)
                assert shown["|dlogp|max"] == largest(row.dlogp)
            if row in groups.rotation:
                assert [shown["rotated qmax"], shown["rotated kmax"]] == [largest(row.q), largest(row.k)]
            if row.check is not None and row.check.expectation == "within":
                assert row.check.reason in shown["has to be"]
    across = it.page.locator("table.across tbody tr").first.locator("td").all_inner_texts()
    assert across == [largest(row.out) for row in groups.merges] and len(across) == 3


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_the_chart_draws_every_path(report: AttentionComparisonReport, opened: Open, width: int) -> None:
    it = opened([broken(report)], width)
    rows = chart_rows(broken(report))
    chart = "document.querySelector('.chart')"
    x, text, symbols = (
        it.page.evaluate(f"Array.from({chart}.data[2].{part})") for part in ("x", "text", "marker.symbol")
    )
    low, high = it.page.evaluate(f"{chart}.layout.xaxis.range")
    assert it.page.locator(".chart .scatterlayer .trace:last-child .point").count() == len(rows)
    for row, at, said, symbol in zip(rows, x, text, symbols, strict=True):
        assert low < math.log10(at) < high
        if row["equal"]:  # seen as equal, not missing
            assert said.strip() == "equal" and symbol == "square" and math.log10(at) < low + 2
        elif row["max"] == "inf":
            assert said.strip() == "∞" and symbol == "triangle-right" and at > 1
        else:
            assert at == row["max"]
    ticks = it.page.evaluate(f"Array.from({chart}.data[1].x)")
    drawn = [row["p99"] for row in rows if not row["equal"]]
    assert [tick for tick, p99 in zip(ticks, drawn, strict=True) if p99] == [p99 for p99 in drawn if p99]
    cut = it.page.evaluate(
        """() => [...document.querySelectorAll(".chart")].flatMap(chart => {
             const frame = chart.getBoundingClientRect();
             return [...chart.querySelectorAll("text")].filter(text => text.textContent.trim()).filter(text => {
               const box = text.getBoundingClientRect();
               return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
             }).map(text => text.textContent); })"""
    )
    assert cut == []
    it.quiet_and_offline()


@needs_browser
def test_layers_are_an_overview_and_fold(report: AttentionComparisonReport, opened: Open) -> None:
    layers = [replace(report, label=f"layer-{n:02}") for n in range(3)] + [broken(report)]
    it = opened(layers)
    it.quiet_and_offline()
    assert it.page.locator("h1").inner_text() == "DRIFT"
    overview = it.page.locator(".overview tbody tr")
    assert [row.locator(".badge").inner_text() for row in overview.all()] == ["PASS"] * 3 + ["DRIFT"]
    assert overview.last.locator("td.lost").all_inner_texts() == ["∞"]
    folds = "[...document.querySelectorAll('details.layer')].map(d => d.open)"
    assert it.page.evaluate(folds) == [False] * 3 + [True]
    overview.nth(1).locator("a").click()
    eventually(it.page, folds, [False, True, False, True])
    eventually(it.page, "document.querySelectorAll('.chart')[1].querySelectorAll('.point').length > 0", True)
    it.quiet_and_offline()


@needs_browser
def test_hostile_text_stays_text(report: AttentionComparisonReport, opened: Open) -> None:
    it = opened([hostile(report)])
    it.quiet_and_offline()
    assert (
        it.page.locator("script").count() == 3 and it.page.locator("tbody b, h2 b, header li b").count() == 0
    )
    clean = HOSTILE.replace("\x1b", "␛").replace("\u202e", "�")
    assert it.page.locator(".layer h2").inner_text() == f"layer-05 {clean}"
    assert clean in (it.page.locator(".absent td").first.text_content() or "")
    it.page.evaluate("Plotly.Fx.hover(document.querySelector('.chart'), [{curveNumber: 2, pointNumber: 0}])")
    eventually(
        it.page,
        f"document.querySelector('.hoverlayer .nums').textContent.includes({json.dumps(clean)})",
        True,
    )
    it.quiet_and_offline()


@needs_browser
def test_provenance_unfolds_with_every_number(report: AttentionComparisonReport, opened: Open) -> None:
    it = opened([report])
    fold = it.page.locator(".layer .folded > details")
    assert not fold.locator("table").first.is_visible()
    fold.locator("> summary").click()
    path = fold.locator("details", has_text="fp8_kv_cache against").first
    path.locator("summary").click()
    said = path.inner_text()
    row: AttentionPathDrift = report["fp8_kv_cache"]
    assert f"max_abs {row.out.max_abs}" in said and "float8_e4m3fn" in said and "v1/bk64" in said
    assert (
        report.provenance["versions"]["torch"]
        in it.page.locator("section", has_text="Where it ran").inner_text()
    )


@needs_browser
def test_nothing_to_compare_is_not_called_equal(report: AttentionComparisonReport, opened: Open) -> None:
    it = opened([changed(report, "chunked_prefill", out=NOTHING, lse=None, dlogp=None)], 700)
    it.quiet_and_offline()
    shown = cells(it, 0, 0)
    assert [shown[name] for name in ("outmax", "outp99", "outdiffer", "lsemax", "bit-equal")] == ["–"] * 5
    assert (
        it.page.evaluate("document.querySelector('.chart').data[2].text[0]").strip() == "nothing to compare"
    )


@needs_browser
def test_colours_follow_the_readers_choice(report: AttentionComparisonReport, opened: Open) -> None:
    it = opened([report])
    colour = "document.querySelector('.chart').data[2].marker.color[0]"
    light = it.page.evaluate(colour)
    it.page.emulate_media(color_scheme="dark")
    eventually(it.page, f"{colour} !== '{light}'", True)
    it.page.emulate_media(color_scheme="light")
    eventually(it.page, f"{colour} === '{light}'", True)
    it.quiet_and_offline()


def eventually(page: Page, expression: str, wanted: object) -> None:
    """Waits for a value; the page's policy forbids the evaluation that playwright's own waiting needs."""
    for _ in range(100):
        found = page.evaluate(expression)
        if found == wanted:
            return
        page.wait_for_timeout(50)
    pytest.fail(f"{expression} stayed {found}")

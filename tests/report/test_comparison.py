"""A comparison in the terminal and as a page: what is shown is what was found, and nothing steers either."""

from __future__ import annotations

import html
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page
from rich.console import Console

from rl_attn_plugin.replay import (
    AttentionComparisonReport,
    AttentionPathDrift,
    TensorDrift,
    Unavailable,
    compare_attention,
    synthetic_inputs,
)
from rl_attn_plugin.replay.results import Check
from rl_attn_plugin.report.comparison import (
    Groups,
    differing,
    equal_bits,
    findings,
    headline,
    keeps,
    print_comparisons,
    reasons,
)
from rl_attn_plugin.report.comparison_html import chart_rows, render_comparison_html, write_comparison_html
from rl_attn_plugin.report.words import largest, number
from tests.replay.te_wheels import installed
from tests.report.browser import Opened, needs_browser

HOSTILE = "</script><script>window.owned=1</script><b>&amp;\x1b[31m\u202e[bold]x[/bold]"
NOTHING = TensorDrift(None, None, None, None, None, 0, 0, 0, True)


@pytest.fixture(scope="module")
def report() -> AttentionComparisonReport:
    """One layer with every kind of row."""
    with installed("2.19.0"):
        found = compare_attention(synthetic_inputs(length=70), impl="torch", label="layer-03")
    peers = [row for row in found.drifts if row.reference_name.endswith(":prefill")]
    if not peers:  # an own one where no library's attention is importable
        fp8 = found["fp8_kv_cache"]
        peer = replace(fp8, name="other:decode", reference_name="other:prefill", lse=None)
        found = replace(found, drifts=[*found.drifts, peer])
    return found


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


def lines_of(text: str, name: str) -> list[list[str]]:
    """The cells of the rows that begin with a path's name."""
    return [line.split()[1:] for line in text.splitlines() if line.split()[:1] == [name] and "•" not in line]


# words


def test_every_row_is_in_one_group(report: AttentionComparisonReport) -> None:
    groups = Groups.of([report])
    parts = [groups.ways, groups.fp8, groups.rotation, groups.merges, groups.peers]
    assert all(parts) and sum(map(len, parts)) == len(report.drifts)
    assert {row.name for row in groups.merges} == {
        "paged_kv_merge", "transformer_engine_paged_kv", "transformer_engine_paged_kv:te_pairwise",
    }  # fmt: skip
    assert [row.name for row in groups.fp8] == ["fp8_kv_cache"]


def test_the_question_is_answered(report: AttentionComparisonReport) -> None:
    assert headline([report]) == "No: every way that has to give its reference’s bits gives them."
    assert headline([report, report]).endswith(", in all 2 layers.") and reasons([report]) == []
    bound = replace(
        report, drifts=[r for r in report.drifts if not r.check or r.check.expectation == "within"]
    )
    assert headline([bound]).startswith("By rounding only")
    checked = sum(row.check is not None for row in report.drifts)
    assert (
        headline([broken(report)]) == f"Yes: 1 of {checked} rows has lost what it has to keep."
        and len(reasons([report, broken(report)])) == 1
    )
    needed = replace(report, verdict="INCONCLUSIVE", reasons=["it is required"], label="")
    assert headline([report, needed]).startswith("Not known") and reasons([needed]) == ["it is required"]
    for show in (headline, render_comparison_html, lambda none: printed(none, 80)):
        with pytest.raises(ValueError, match="at least one comparison, got none"):
            show([])


def test_findings_name_what_is_kept_and_what_others_do(report: AttentionComparisonReport) -> None:
    equal, within, fp8, peers = findings([report])
    assert "paged_kv," in equal and "decode_replay:prefix_shared" in equal and "merge" not in equal
    assert "paged_kv_merge" in within and "transformer_engine_paged_kv" in within
    cost = report["fp8_kv_cache"]
    assert cost.dlogp is not None
    assert largest(cost.out) in fp8 and number(cost.dlogp.mean_abs) in fp8
    for row in Groups.of([report]).peers:
        assert f"{row.name.removesuffix(':decode')} {largest(row.out)}" in peers
    # of two layers the worse one counts
    assert "paged_kv," not in findings([report, broken(report)])[0]


def test_equal_bits_are_those_of_out_and_lse(report: AttentionComparisonReport) -> None:
    row = report["decode_replay"]
    assert row.lse is not None and equal_bits(row) == "yes" and keeps(row) == "✓ bit-equal"
    assert equal_bits(replace(row, lse=replace(row.lse, bit_equal=False))) == "no"
    assert equal_bits(replace(row, lse=None)) == "yes"
    assert equal_bits(replace(row, out=NOTHING)) == "–" and differing(replace(row, out=NOTHING)) == "–"
    assert keeps(report["fp8_kv_cache"]) == "informs"
    assert keeps(broken(report)["paged_kv"]) == "✗ NOT bit-equal"


# terminal


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_terminal_says_what_was_found(report: AttentionComparisonReport, width: int) -> None:
    text = printed([report], width)
    assert text.index("PASS") < text.index("No: every way") < text.index("schedule v1/") < text.index("path ")
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    assert "dlogp = logp_trainer − logp_rollout" in text and "window" not in text
    for name in ("chunked_prefill", "decode_replay:prefix_shared", "fp8_kv_cache", "plain_rope_attention"):
        row = next(row for row in report.drifts if row.name == name)
        (cells,) = lines_of(text, name)  # its name is on one line, and its numbers beside it
        assert row.dlogp is not None
        shown = [largest(row.out), largest(row.lse), number(row.dlogp.mean_abs), largest(row.dlogp)]
        if width >= 100:
            shown[1:1] = [number(row.out.mean_abs), *differing(row).split()]
        assert cells[: len(shown)] == shown
        assert equal_bits(row) in cells and cells[-len(keeps(row).split()) :] == keeps(row).split()
    merges = lines_of(text, "paged_kv_merge")
    assert [cells[0] for cells in merges] == [
        largest(r.out) for r in report.drifts if r.name == "paged_kv_merge"
    ]
    assert all(
        f"vs {name}" in text for name in ("full_prefill", "unfused_rope_attention", "their own prefill")
    )
    for missing in report.unavailable:
        assert f"{missing.name}: {missing.reason}" in " ".join(text.split())


def test_the_terminal_says_what_is_lost_and_is_not_steered(report: AttentionComparisonReport) -> None:
    for found in (broken(report), hostile(report)):
        text = printed([report, found], 80)
        assert "DRIFT" in text and "has lost what it has to keep." in text and "✗ NOT bit-equal" in text
        assert "∞" in text and max(map(len, text.splitlines())) <= 80
        assert "\x1b[31m" not in text and "\u202e" not in text
        assert "[bold]x[/bold]" in re.sub(r"[\s│]", "", text)


def test_the_terminal_leaves_out_what_is_not_there(report: AttentionComparisonReport) -> None:
    rows = [replace(row, dlogp=None, lse=None) for row in report.drifts]
    text = printed([replace(report, drifts=rows)], 100)
    assert "lse" not in text.split("path", 1)[1] and "dlogp" not in text.split("has to be", 1)[1]
    many = replace(report, verdict="DRIFT", reasons=[f"reason {n}" for n in range(40)])
    assert "and 28 more" in printed([many], 80)


# page


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

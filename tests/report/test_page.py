"""The page in a real headless Chromium: charts drawn, silent, offline, escaped, at both widths."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from playwright.sync_api import Page

from rl_attn_plugin.drift import DriftReport, Thresholds, summarize
from rl_attn_plugin.report import write_html
from rl_attn_plugin.report.words import visible
from tests.report.browser import Opened, needs_browser
from tests.report.factory import HOSTILE, run

pytestmark = needs_browser

_MARKS = {
    "steps": ".bars .point path",
    "histogram-0": ".bars .point path",
    "histogram-1": ".bars .point path",
    "position": ".scatterlayer .point",
    "probability": ".scatterlayer .point",
    "scatter-0": ".scatterlayer .point",
    "scatter-1": ".scatterlayer .point",
}


_TEXT_COLOURS = ("ink", "soft", "good", "bad", "unsure", "broken", "tested")


@dataclass
class Shown:
    """An opened report, and what it was made from."""

    opened: Opened
    report: DriftReport
    table: pa.Table

    @property
    def page(self) -> Page:
        return self.opened.page

    def marks(self, chart: str) -> int:
        return self.page.locator(f"#{chart} {_MARKS[chart]}").count()

    def drawn(self, chart: str, trace: int, values: str) -> list[float]:
        found: list[float] = self.page.evaluate(
            "([id, trace, values]) => Array.from(document.getElementById(id).data[trace][values])",
            [chart, trace, values],
        )
        return found


Open = Callable[..., Shown]


@pytest.fixture
def opened(open_file: Callable[..., Opened], tmp_path: Path) -> Open:
    def make(table: pa.Table, manifest: dict[str, Any], width: int = 1280, scheme: Any = "light") -> Shown:
        report = summarize(table, arm_under_test="plugin", thresholds=Thresholds(), min_tokens=200)
        path = tmp_path / "report.html"
        write_html(report, table, manifest, path)
        return Shown(open_file(path, width, scheme), report, table)

    return make


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_chart_is_drawn_from_the_runs_numbers(opened: Open, width: int, scheme: str) -> None:
    table, manifest = run()
    it = opened(table, manifest, width, scheme)
    it.opened.quiet_and_offline()
    wide, inner = it.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= inner == width

    arms = list(it.report.arms.values())
    assert it.page.locator(".chart svg.main-svg").count() >= len(_MARKS)
    assert it.marks("steps") == 6
    assert it.marks("position") == 2 * sum(len(arm.by_position) for arm in arms)
    assert it.marks("probability") == 2 * sum(len(arm.by_probability) for arm in arms)
    for i, (name, arm) in enumerate(it.report.arms.items()):
        assert it.drawn("steps", i, "x") == [step.mean_abs for step in arm.steps.values()]
        assert it.drawn("position", i, "y") == [b.mean_abs for b in arm.by_position]
        assert it.drawn("position", i + 2, "y") == [b.max_abs for b in arm.by_position]
        counts = arm.histogram.counts
        assert it.drawn(f"histogram-{i}", 0, "y") == [n or None for n in counts]
        heights = it.page.eval_on_selector_all(
            f"#histogram-{i} .bars .point path", "paths => paths.map(p => p.getBBox().height)"
        )
        assert sum(h > 0 for h in heights) == sum(n > 0 for n in counts)
        rows = table.filter((pc.field("arm") == name) & (pc.field("path") == "recorded"))
        assert it.marks(f"scatter-{i}") == rows.num_rows
        for axis, column in (("x", "logp_rollout"), ("y", "logp_trainer")):
            p = np.exp(rows[column].to_numpy().astype(np.float64))
            assert np.sort(it.drawn(f"scatter-{i}", 1, axis)) == pytest.approx(np.sort(p), abs=1e-6)


@pytest.mark.parametrize("width", [1280, 390])
def test_no_chart_text_is_cut_or_overlaps_its_neighbour(opened: Open, width: int) -> None:
    it = opened(*run(), width)
    assert it.opened.cut_texts() == []


def test_verdict_reasons_and_numbers_stand_on_top(opened: Open) -> None:
    it = opened(*run(fault=3.0))
    header = it.page.locator("header")
    assert it.page.title() == "DRIFT · SmolLM2-135M-Instruct"
    assert header.locator("h1").inner_text() == "DRIFT"
    text = header.inner_text()
    assert "3 of 4 numbers are above their bound" in text
    assert (
        "Tokens drawn at temperature 0.8, top-p 0.95" in text
        and "dlogp = logp_trainer − logp_rollout" in text
    )
    assert header.locator(".checks li.above").count() == 3
    assert header.locator(".checks li.within").count() == 1
    first_chart = it.page.locator("#steps").bounding_box()
    bottom = header.bounding_box()
    assert bottom and first_chart and bottom["y"] + bottom["height"] < first_chart["y"]
    assert (
        "98\N{NO-BREAK SPACE}% of the drift arises in chunked − replay"
        in it.page.locator("main").inner_text()
    )


def test_worst_tokens_are_marked_inside_their_text(opened: Open) -> None:
    it = opened(*run())
    it.page.locator(".more > summary").click()
    items = it.page.locator(".worst > li")
    assert items.count() == len(it.report.worst) == 20
    for i, token in enumerate(it.report.worst):
        assert items.nth(i).locator("mark").text_content() == visible(token.text)
        context = items.nth(i).locator(".context").first.text_content() or ""
        assert visible(token.before + token.text + token.after) in context
    items.first.locator("summary").click()
    assert items.first.locator(".prompt").is_visible()


def test_model_text_stays_text(opened: Open) -> None:
    table, manifest = run(samples=6)
    hostile = [HOSTILE, "<img src=x onerror=window.owned=2>", "<b>bold</b>", "%{x}<br>", "&lt;i&gt;", "${1}"]
    texts = [hostile[token % len(hostile)] for token in table["token_id"].to_pylist()]
    table = table.set_column(3, "text", [texts])
    manifest["model"]["name"] = f"model {HOSTILE}"
    for sample in manifest["samples"]:
        sample["prompt_text"] = f"prompt {HOSTILE}"
    it = opened(table, manifest)
    it.opened.quiet_and_offline()
    assert it.page.evaluate("window.owned") is None
    assert it.page.locator("script").count() == 3 and it.page.locator("main img, main b b").count() == 0
    assert it.page.title() == f"PASS · model {HOSTILE}"
    for i, token in enumerate(it.report.worst[:8]):
        assert it.page.locator(".worst mark").nth(i).text_content() == token.text

    # and as the text that plotly shows at a point, where some tags would be drawn as markup
    shown = it.page.evaluate("JSON.parse(document.getElementById('data').textContent).arms[1].points.text")
    for text in hostile:
        it.page.evaluate(
            "k => Plotly.Fx.hover('scatter-1', [{curveNumber: 1, pointNumber: k}])", shown.index(text)
        )
        label = "document.querySelector('#scatter-1 .hoverlayer .nums')?.textContent"
        eventually(it.page, f"{label}.startsWith({json.dumps(text + 'rollout ')})", bool)
    assert it.opened.said == [] and it.page.evaluate("window.owned") is None


def test_the_browser_itself_forbids_other_scripts_and_the_network(opened: Open) -> None:
    it = opened(*run(samples=2))
    it.page.evaluate(
        """() => { const script = document.createElement("script"); script.textContent = "window.owned = 3";
                   document.body.append(script); }"""
    )
    assert it.page.evaluate("window.owned") is None
    assert it.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert any("Content Security Policy" in message for message in it.opened.said)


def test_colours_follow_the_readers_choice_and_are_readable(opened: Open) -> None:
    it = opened(*run())
    colour = "getComputedStyle(document.querySelector('#steps .xtick text')).fill"
    bar = "document.getElementById('steps').data[1].marker.color"
    light = it.page.evaluate(colour), it.page.evaluate(bar)
    for scheme in ("dark", "light"):
        it.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        eventually(it.page, f"({colour} !== '{light[0]}') === {str(scheme == 'dark').lower()}", bool)
        style = it.page.evaluate(
            """names => Object.fromEntries(names.map(name =>
                 [name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim()]))""",
            ["page", *_TEXT_COLOURS, "mark", "mark-ink"],
        )
        for name in _TEXT_COLOURS:
            assert _contrast(style[name], style["page"]) >= 4.5, (scheme, name)
        assert _contrast(style["mark-ink"], style["mark"]) >= 4.5, scheme
        assert (it.page.evaluate(bar) != light[1]) == (scheme == "dark")
    it.opened.quiet_and_offline()


def test_it_prints(opened: Open) -> None:
    it = opened(*run(), scheme="dark")
    it.page.emulate_media(media="print")
    eventually(
        it.page,
        "getComputedStyle(document.querySelector('#steps .xtick text')).fill",
        lambda found: found == "rgb(68, 68, 68)",
    )
    pdf = it.page.pdf(format="A4")
    assert pdf.startswith(b"%PDF") and len(pdf) > 30_000
    it.opened.quiet_and_offline()


@pytest.mark.parametrize("state", ["missing", "few", "empty", "equal", "bare", "one token"])
def test_every_state_of_a_run_opens(opened: Open, state: str) -> None:
    table, manifest = run(plugin_noise=0.0) if state == "equal" else run()
    verdict, words = "INCONCLUSIVE", "tokens compared, 200 needed"
    if state == "missing":
        table = table.filter(~((pc.field("arm") == "plugin") & (pc.field("path") == "decode_replay")))
        verdict, words = "INVALID", "arm plugin has no tokens of path decode_replay"
    elif state == "few":
        table = table.filter(pc.field("sample") == 0)
    elif state == "empty":
        table = table.slice(0, 0)
    elif state == "one token":
        table = table.filter((pc.field("sample") == 0) & (pc.field("position") == 20))
    else:
        verdict, words = "PASS", "every number is within its bound"
        manifest = manifest if state == "equal" else {}
    it = opened(table, manifest, 390)
    it.opened.quiet_and_offline()
    assert it.page.locator("h1").inner_text() == verdict == it.report.verdict
    assert words in it.page.locator("header").inner_text()
    wide, inner = it.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= inner


def eventually(page: Page, expression: str, holds: Callable[[Any], bool]) -> None:
    """Waits for a value; the page's policy forbids the evaluation that playwright's own waiting needs."""
    for _ in range(100):
        found = page.evaluate(expression)
        if holds(found):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"{expression} stayed {found}")


def _contrast(a: str, b: str) -> float:
    """Contrast of two ``#rrggbb`` colours as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        digits = colour.lstrip("#")
        digits = "".join(c * 2 for c in digits) if len(digits) == 3 else digits
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)

"""Drift of files, in the terminal and as a page in a real headless Chromium."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rl_attn_plugin.offline import DriftFilesReport, Options, RunDrift, Wanted, measure
from rl_attn_plugin.report.drift_files import headline, print_drift_files, worth_showing
from rl_attn_plugin.report.drift_files_html import histogram, render_drift_files_html
from rl_attn_plugin.report.words import visible
from tests.report.browser import Opened, needs_browser
from tests.report.factory import HOSTILE

_TEXTS = ["the", " and", " 84", "\n", " <b>", HOSTILE, "\x1b[31m", "\u202eabc", " %{x}", "&lt;"]


class Hostile:
    """A tokenizer whose tokens would steer a terminal or a page."""

    def decode(self, ids: list[int], /) -> str:
        return "".join(_TEXTS[i] for i in ids)


def measured(
    folder: Path,
    *,
    steps: int = 4,
    fault: int | None = None,
    size: float = 0.5,
    noise: float = 0.01,
    name: str = "run",
    broken: tuple[str, ...] = (),
    text: bool = True,
    min_tokens: int = 1000,
) -> tuple[RunDrift, np.ndarray]:
    """A run from a real file, and its dlogp.

    Args:
        folder: for the file.
        steps: of training.
        fault: step from which on dlogp is larger.
        size: of the fault, nats.
        noise: without it.
        name: of the file.
        broken: further lines.
        text: whether there is a tokenizer.
        min_tokens: fewer are INCONCLUSIVE.
    """
    rng = np.random.default_rng(3)
    lines, every = [], []
    for step in range(steps):
        spread = size if fault is not None and step >= fault else noise
        for sample in range(5):
            rollout = -rng.exponential(1.0, 240) - 1e-3
            trainer = np.minimum(rollout + spread * rng.standard_normal(240), -1e-6)
            every.append(trainer - rollout)
            row: dict[str, Any] = {"step": step, "sample": sample, "env": ["math", HOSTILE][sample % 2]}
            row |= {"logp_trainer": trainer.tolist(), "logp_rollout": rollout.tolist()}
            ids = rng.integers(0, len(_TEXTS), 240).tolist()
            row |= {"token_ids": ids}
            lines.append(json.dumps(row))
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join([*lines, *broken]) + "\n")
    options = Options(
        wanted=Wanted(groups=("env",)),
        skip_damaged=True,
        min_tokens=min_tokens,
        tokenizer=Hostile() if text else None,
    )
    return measure([path], options), np.concatenate(every)


def report_of(run: RunDrift, against: RunDrift | None = None) -> DriftFilesReport:
    return DriftFilesReport(
        run=run,
        against=against,
        min_tokens=1000,
        over_threshold=0.2,
        created="2026-01-02T03:04:05+00:00",
        version="1.2.3",
    )


def printed(report: DriftFilesReport, width: int = 80) -> str:
    out = io.StringIO()
    print_drift_files(report, Console(file=out, width=width, color_system=None))
    return out.getvalue()


def test_the_histogram_holds_every_token_once(tmp_path: Path) -> None:
    run, dlogp = measured(tmp_path, fault=2)
    found = histogram(run)
    assert sum(found["positive"]) == (dlogp > 0).sum() and sum(found["negative"]) == (dlogp < 0).sum()
    assert found["zeros"] == (dlogp == 0).sum()
    # a bin of the monitor is 1 % wide, so tokens may change bars only that near to an edge
    for i, low in enumerate(found["low"]):
        inside = (np.abs(dlogp) >= 10**low * 1.02) & (np.abs(dlogp) < 10 ** (low + 0.1) / 1.02)
        near = (np.abs(dlogp) >= 10**low / 1.02) & (np.abs(dlogp) < 10 ** (low + 0.1) * 1.02)
        count = found["positive"][i] + found["negative"][i]
        assert inside.sum() <= count <= near.sum()


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_says_what_since_when_and_where(tmp_path: Path, width: int) -> None:
    run, _ = measured(tmp_path, steps=6, fault=4)
    good, _ = measured(tmp_path, steps=6, name="old")
    text = printed(report_of(run, good), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "DRIFT" in text and "from step 4" in " ".join(text.replace("│", " ").split())
    assert "▁▁▁▁" in text  # four quiet steps
    assert "By env" in text and "math" in text
    assert "\x1b" not in text and "\u202e" not in text and "␛[31m" in text
    for token in run.worst[:3]:
        assert f"{abs(token.dlogp):.2f}"[:4] in text


def test_headlines() -> None:
    run = RunDrift(
        name="x", verdict="PASS", reasons=[], metrics={"tokens/compared": 1234.0}, checks=[], steps=[], alerts=[],
        diagnoses=[], tables={}, edges=[], positive=[], negative=[], worst=[], invalid=[], files=[], problems=[],
        more_problems=0,
    )  # fmt: skip
    assert headline(run, 1) == "Trainer and rollout agree: on 1,234 tokens every number is within its bound."
    few = headline(replace(run, verdict="INCONCLUSIVE"), 5000)
    assert few.startswith("1,234 tokens can be compared; it takes 5,000")
    assert "cannot be told" in headline(replace(run, verdict="INCONCLUSIVE"), 1)
    assert "1,234 tokens can be compared" in headline(replace(run, verdict="INVALID"), 1)


def test_of_many_steps_the_first_the_last_the_worst_and_the_first_that_fires_are_shown(
    tmp_path: Path,
) -> None:
    run, _ = measured(tmp_path, steps=41, fault=38)
    shown = worth_showing(run)
    peak = max(range(41), key=lambda i: run.steps[i].metrics["dlogp/abs_mean"])
    assert {0, 38, 40, peak} <= set(shown) and len(shown) <= 14


Open = Callable[..., Opened]


@pytest.fixture
def opened(open_file: Open, tmp_path: Path) -> Open:
    def make(report: DriftFilesReport, width: int = 1280, scheme: Any = "light") -> Opened:
        path = tmp_path / "report.html"
        path.write_text(render_drift_files_html(report), "utf-8", errors="replace")
        return open_file(path, width, scheme)

    return make


def traces(it: Opened, chart: str) -> Any:
    return it.page.evaluate(
        "id => document.getElementById(id).data.map(t => ({name: t.name, x: [...t.x], y: [...t.y]}))", chart
    )


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_chart_is_drawn_from_the_runs_numbers(
    opened: Open, tmp_path: Path, width: int, scheme: str
) -> None:
    run, _ = measured(tmp_path, fault=2)
    good, _ = measured(tmp_path, name="old")
    it = opened(report_of(run, good), width, scheme)
    it.quiet_and_offline()
    wide, inner = it.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= inner == width
    for i, check in enumerate(run.checks):
        drawn = {trace["name"]: trace for trace in traces(it, f"series-{i}")}
        values = [step.metrics[check.metric] for step in run.steps]
        assert drawn[visible(run.name)]["x"] == [0, 1, 2, 3]
        assert drawn[visible(run.name)]["y"] == pytest.approx(values)
        firing = [step.step for step in run.steps if check.metric in step.firing]
        assert drawn.get("fires", {"x": []})["x"] == firing
    shares = traces(it, "histogram")
    assert len(shares) == 4
    assert math.fsum(y or 0 for trace in shares[:2] for y in trace["y"]) == pytest.approx(1)
    for chart in ("position", "probability"):
        drawn_curves = traces(it, chart)
        for k, each in enumerate((run, good)):
            bins = each.tables[chart]
            assert drawn_curves[k]["y"] == [found.abs_mean for found in bins]
            assert drawn_curves[2 + k]["y"] == [found.abs_p99 for found in bins]
        assert it.page.locator(f"#{chart} .scatterlayer .point").count() == 2 * (
            len(run.tables[chart]) + len(good.tables[chart])
        )


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_no_chart_text_is_cut(opened: Open, tmp_path: Path, width: int) -> None:
    run, _ = measured(tmp_path, fault=2)
    it = opened(report_of(run), width)
    assert it.cut_texts() == []


@needs_browser
def test_verdict_numbers_tokens_and_problems_are_there_and_model_text_stays_text(
    opened: Open, tmp_path: Path
) -> None:
    broken = ("{not json", json.dumps({"step": 0, "logp_trainer": [-1.0], "logp_rollout": [None]}))
    run, _ = measured(tmp_path, fault=2, broken=broken, name="<img src=x onerror=window.owned=2>")
    it = opened(report_of(run))
    it.quiet_and_offline()
    assert it.page.title() == f"INVALID · {run.name}"
    assert it.page.locator("h1").inner_text() == "INVALID"
    assert it.page.locator("script").count() == 3 and it.page.locator("main img").count() == 0
    text = it.page.locator("main").inner_text()
    assert "What is wrong with the files" in text and "line 21: is not JSON" in text
    assert "Tokens without a log-prob" in text
    it.page.locator(".more > summary", has_text="24 more").click()
    marks = it.page.locator(".worst mark")
    assert marks.count() == len(run.worst) + len(run.invalid)
    for i, token in enumerate(run.worst):
        assert marks.nth(i).text_content() == visible(token.text or "")
    assert it.page.locator("tr:has(th:has-text('window.owned=1'))").first.is_visible()


@needs_browser
def test_one_step_has_no_series_and_no_token_no_chart(opened: Open, tmp_path: Path) -> None:
    run, _ = measured(tmp_path, steps=1, text=False, min_tokens=1)
    it = opened(report_of(run))
    it.quiet_and_offline()
    assert it.page.locator("h1").inner_text() == "PASS"
    assert it.page.locator("#series-0").count() == 0 and it.page.locator("#histogram svg").count() > 0
    assert "--tokenizer" in it.page.locator("main").inner_text()
    none = tmp_path / "none.jsonl"
    none.write_text(json.dumps({"logp_trainer": [-1.0, -2.0], "logp_rollout": [None, None]}) + "\n")
    empty = opened(report_of(measure([none], Options())))
    empty.quiet_and_offline()
    assert empty.page.locator("h1").inner_text() == "INVALID" and empty.page.locator(".chart").count() == 0
    assert len(empty.page.content()) < 100_000

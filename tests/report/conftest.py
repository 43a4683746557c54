"""One real headless Chromium for all tests of pages, and one layer for all tests of comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from rl_attn_plugin.replay import AttentionComparisonReport, compare_attention, synthetic_inputs
from tests.replay.te_wheels import installed
from tests.report.browser import CHROMIUM, Opened


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield launched
        launched.close()


@pytest.fixture
def open_file(browser: Browser) -> Iterator[Callable[..., Opened]]:
    """Opens files, at a width and in a colour scheme, and closes them after the test."""

    def opened(path: Path, width: int = 1280, scheme: Any = "light") -> Opened:
        return Opened.of(browser, path, width, scheme)

    yield opened
    for context in list(browser.contexts):
        context.close()


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

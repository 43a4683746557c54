"""One real headless Chromium for all tests of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

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

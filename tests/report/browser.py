"""Pages in a real headless Chromium."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

CHROMIUM = next(
    filter(None, (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, none is on PATH")


@dataclass
class Opened:
    """A page, and what it said and asked for while it was open."""

    page: Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, browser: Browser, path: Path, width: int, scheme: Any) -> Opened:
        """A file, once its charts are drawn.

        Args:
            browser: keeps the page until its context is closed.
            path: of the page.
            width: of the window, pixels.
            scheme: ``"light"`` or ``"dark"``.
        """
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        found = cls(context.new_page())
        found.page.on("console", lambda message: found.said.append(message.text))
        found.page.on("pageerror", lambda error: found.said.append(str(error)))
        found.page.on("request", lambda request: found.asked.append(request.url))
        found.page.goto(path.as_uri())
        found.page.wait_for_selector("html[data-drawn=yes]", state="attached", timeout=60_000)
        return found

    def quiet_and_offline(self) -> None:
        assert self.said == []
        assert [url for url in self.asked if not url.startswith("data:")] == [self.page.url.split("#")[0]]
        assert self.page.evaluate("window.owned") is None

    def cut_texts(self) -> list[str]:
        """Texts of charts that stand out of their frame."""
        found: list[str] = self.page.evaluate(
            """() => [...document.querySelectorAll(".chart")].flatMap(chart => {
                 const frame = chart.getBoundingClientRect();
                 return [...chart.querySelectorAll("text")].filter(text => text.textContent.trim()).filter(text => {
                   const box = text.getBoundingClientRect();
                   return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
                 }).map(text => `${chart.id}: ${text.textContent}`);
               })"""
        )
        return found

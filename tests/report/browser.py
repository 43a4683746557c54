"""Which Chromium the tests of pages open."""

from __future__ import annotations

import shutil

import pytest

CHROMIUM = next(
    filter(None, (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, none is on PATH")

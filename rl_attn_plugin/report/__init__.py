"""A `DriftReport` as JSON, as a table in the terminal, and as one self-contained HTML page."""

from __future__ import annotations

from rl_attn_plugin.report.files import write_json
from rl_attn_plugin.report.html import render_html, write_html
from rl_attn_plugin.report.terminal import print_report

__all__ = ["print_report", "render_html", "write_html", "write_json"]

"""The dashboard asks for what is served, and for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rl_attn_plugin.monitor.sinks import PrometheusSink
from tests.monitor.sinks.scrape import scraped
from tests.monitor.sinks.steps import judged

DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana" / "rl-attn-drift.json"
NAME = re.compile(r"\brl_attn_drift_\w+")
PATTERN = re.compile(r'__name__=~"([^"]+)"')


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def test_every_metric_is_served() -> None:
    with PrometheusSink(port=0) as sink:
        sink.write(*judged(1))
        served = {sample.name for sample in scraped(sink.port)}
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    queries += [v["query"]["query"] for v in dashboard()["templating"]["list"] if v["type"] == "query"]
    patterns = [pattern for query in queries for pattern in PATTERN.findall(query)]
    names = {name for query in queries for name in NAME.findall(PATTERN.sub("", query))}
    assert names and names <= served, names - served
    for pattern in patterns:
        assert any(re.fullmatch(pattern, name) for name in served), pattern
    asked = {"verdict", "dlogp_abs_mean", "dlogp_abs_p99", "kl_k3", "ess", "tokens_over_threshold"}
    asked |= {"tokens_bit_equal", "tokens_compared", "abs_dlogp_bucket", "step"}
    assert {f"rl_attn_drift_{name}" for name in asked} <= names


def test_the_dashboard_holds_together() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len({panel["title"] for panel in panels})
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        assert panel["targets"] and panel["description"] and place["x"] + place["w"] <= 24
        mine = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & mine, f"{panel['title']} lies over another panel"
        cells |= mine
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)

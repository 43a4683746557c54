"""What Prometheus would see."""

from __future__ import annotations

from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def scraped(port: int | None) -> list[Sample]:
    """Samples of a scrape over HTTP, parsed by Prometheus' own client."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]


def values(port: int | None) -> dict[str, float]:
    """By name, of samples without a label."""
    return {sample.name: sample.value for sample in scraped(port) if not sample.labels}

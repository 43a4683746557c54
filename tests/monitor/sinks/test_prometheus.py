"""What a scrape over HTTP gives."""

from __future__ import annotations

import math
import socket
import threading
from urllib.error import URLError
from urllib.request import Request, urlopen

import prometheus_client
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.samples import Sample

from rl_attn_plugin.monitor.sinks import PrometheusSink
from tests.monitor.sinks.scrape import scraped, values
from tests.monitor.sinks.steps import judged


def series(name: str) -> str:
    return "rl_attn_drift_" + name.replace("/", "_")


def buckets(samples: list[Sample]) -> dict[float, float]:
    return {float(s.labels["le"]): s.value for s in samples if s.name == series("abs_dlogp_bucket")}


def test_every_metric_of_the_last_step() -> None:
    with PrometheusSink(port=0) as sink:
        # before the first step there is nothing to say but that no token was counted
        assert values(sink.port) == {series("abs_dlogp_count"): 0, series("abs_dlogp_sum"): 0}
        assert len(scraped(sink.port)) == 33
        for judgement, monitor in (judged(1), judged(2, size=0.5)):
            sink.write(judgement, monitor)
            found = values(sink.port)
            for name, value in judgement.metrics.items():
                assert found[series(name)] == value, name
            assert found[series("step")] == judgement.step
            others = {"step", "abs_dlogp_count", "abs_dlogp_sum"}
            assert set(found) == {series(name) for name in judgement.metrics.keys() | others}
            verdicts = {
                s.labels["verdict"]: s.value for s in scraped(sink.port) if s.name == series("verdict")
            }
            assert verdicts == {
                name: float(name == judgement.verdict)
                for name in ("PASS", "DRIFT", "INCONCLUSIVE", "INVALID")
            }


def test_what_a_step_has_not_is_gone() -> None:
    with PrometheusSink(port=0) as sink:
        sink.write(*judged(1))
        assert series("dlogp/abs_mean") in values(sink.port)
        sink.write(*judged(2, tokens=50, invalid=50))
        found = values(sink.port)
        assert series("dlogp/abs_mean") not in found and series("ess") not in found
        assert found[series("invalid/trainer_nan")] == 50
        assert found[series("abs_dlogp_count")] == 2000  # of all steps
        sink.write(*judged(3))
        assert series("dlogp/abs_mean") in values(sink.port)


def test_histogram_counts_the_tokens_of_all_steps() -> None:
    first, second = judged(1), judged(2, size=40.0)
    with PrometheusSink(port=0) as sink:
        sink.write(*first)
        one = buckets(scraped(sink.port))
        sink.write(*second)
        samples = scraped(sink.port)
    both = buckets(samples)
    assert list(both) == sorted(both) and list(both.values()) == sorted(both.values())
    assert all(both[bound] >= one[bound] for bound in one)
    assert both[0.0] == sum(j.metrics["tokens/bit_equal"] for j, _ in (first, second))
    assert one[2.0**-4] == 2000 > one[2.0**-8] > one[2.0**-20] >= one[0.0]
    assert both[math.inf] == 4000 > both[16.0]
    # the same from the tokens themselves
    counted = dict.fromkeys(both, 0.0)
    for _, monitor in (first, second):
        edges, positive, negative = monitor.histogram()
        for bound in counted:
            counted[bound] += sum(
                p + n for e, p, n in zip(edges, positive, negative, strict=True) if e <= bound
            )
    assert both == counted
    total = {s.name: s.value for s in samples}
    wanted = sum(j.metrics["dlogp/abs_mean"] * 2000 for j, _ in (first, second))
    assert total[series("abs_dlogp_sum")] == pytest.approx(wanted, rel=1e-12)
    assert total[series("abs_dlogp_count")] == 4000


def test_labels_are_on_every_series() -> None:
    with PrometheusSink(port=0, labels={"run": 'a"b\\c\n', "model": "m"}) as sink:
        sink.write(*judged(1))
        samples = scraped(sink.port)
    assert len(samples) > 60
    assert all(s.labels["run"] == 'a"b\\c\n' and s.labels["model"] == "m" for s in samples)


@pytest.mark.parametrize("name", ["le", "verdict", "__name__", "1st", "a-b", ""])
def test_labels_that_cannot_be(name: str) -> None:
    with pytest.raises(ValueError, match=f"a label must be .*got {name!r}"):
        PrometheusSink(port=0, labels={name: "x"})


def test_infinities_and_nan() -> None:
    judgement, monitor = judged(1)
    judgement.metrics.update({"ratio/max": math.inf, "kl/k1": math.nan})
    with PrometheusSink(port=0) as sink:
        sink.write(judgement, monitor)
        found = values(sink.port)
    assert found[series("ratio/max")] == math.inf and math.isnan(found[series("kl/k1")])


def test_openmetrics_is_understood_too() -> None:
    with PrometheusSink(port=0) as sink:
        sink.write(*judged(1))
        request = Request(
            f"http://127.0.0.1:{sink.port}/metrics",
            headers={"Accept": "application/openmetrics-text; version=1.0.0"},
        )
        with urlopen(request, timeout=10) as answer:
            assert "openmetrics" in answer.headers["Content-Type"]
            page = answer.read().decode()
    names = {family.name for family in openmetrics(page)}
    assert {series("abs_dlogp"), series("ess"), series("step")} <= names


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted = rf"cannot listen on port {port} of 127.0.0.1 \(.*in use\): pass another port, or 0"
        with pytest.raises(OSError, match=wanted):
            PrometheusSink(port=port)


def test_no_port_at_all() -> None:
    with pytest.raises(OSError, match="cannot listen on port 70000"):
        PrometheusSink(port=70000)


def test_loopback_alone_by_default() -> None:
    with PrometheusSink(port=0) as sink:
        assert sink._server.server_address[0] == "127.0.0.1"


def test_closing_frees_the_port_and_stops_the_thread() -> None:
    before = threading.active_count()
    sink = PrometheusSink(port=0)
    port = sink.port
    sink.close()
    sink.close()
    assert threading.active_count() == before
    with pytest.raises(URLError):
        scraped(port)
    with pytest.raises(ValueError, match="must be open to write step 1, it is closed"):
        sink.write(*judged(1))
    PrometheusSink(port=port).close()


def test_a_registry_that_is_served_elsewhere() -> None:
    registry = prometheus_client.CollectorRegistry()
    other = prometheus_client.Gauge("mine", "mine", registry=registry)
    other.set(3)
    with PrometheusSink(port=None, registry=registry) as sink:
        assert sink.port is None
        sink.write(*judged(1))
        page = prometheus_client.generate_latest(registry).decode()
        assert "\nmine 3.0\n" in page and "\nrl_attn_drift_step 1.0\n" in page
        with pytest.raises(ValueError, match="rl_attn_drift_step"):
            PrometheusSink(port=None, registry=registry)
    assert "rl_attn_drift" not in prometheus_client.generate_latest(registry).decode()


def test_a_failed_start_leaves_the_registry_as_it_was() -> None:
    registry = prometheus_client.CollectorRegistry()
    with pytest.raises(OSError):
        PrometheusSink(port=70000, registry=registry)
    PrometheusSink(port=0, registry=registry).close()


def test_scrapes_see_whole_steps() -> None:
    """While steps are written, a scrape gives one step and not parts of two."""
    steps = [judged(1, tokens=1100), judged(2, tokens=1200)]
    stop = threading.Event()
    with PrometheusSink(port=0) as sink:

        def write() -> None:
            while not stop.is_set():
                for step in steps:
                    sink.write(*step)

        sink.write(*steps[0])
        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(30):
                found = values(sink.port)
                assert found[series("tokens/active")] == 1000 + 100 * found[series("step")]
        finally:
            stop.set()
            writer.join()

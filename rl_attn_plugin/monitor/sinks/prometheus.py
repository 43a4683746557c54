"""An HTTP endpoint that Prometheus scrapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from rl_attn_plugin.drift.verdict import Verdict
from rl_attn_plugin.monitor.monitor import DriftMonitor
from rl_attn_plugin.monitor.sinks.common import OCTAVES, Closing, load, octaves
from rl_attn_plugin.monitor.watch import Judgement
from rl_attn_plugin.monitor.worst import Tokenizer

_PREFIX = "rl_attn_drift_"
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = ("verdict", "le")


class PrometheusSink(Closing):
    """Serves the last step: ``rl_attn_drift_dlogp_abs_mean`` and so on, a gauge for each metric.

    A metric that a step has not is not served: neither 0 nor the value of an earlier step. The verdict is
    ``rl_attn_drift_verdict{verdict="DRIFT"}``, 1 for the one that holds. The histogram ``rl_attn_drift_abs_dlogp``
    counts the tokens of all steps since the sink was made, as Prometheus wants of histograms; its buckets hold what
    lies below their bound.

    Attributes:
        port: that is listened on; None without a server.
    """

    def __init__(
        self,
        port: int | None = 9464,
        host: str = "127.0.0.1",
        registry: Any = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            port: 0 takes a free one; None starts no server, for a registry that is served already.
            host: address to listen on; by default this machine alone can scrape. Nothing is encrypted or asked for a
                password.
            registry: a `prometheus_client.CollectorRegistry`; one of its own if None.
            labels: of every series, such as the run's name.

        Raises:
            ImportError: prometheus_client is missing.
            OSError: the port cannot be listened on.
            ValueError: a label cannot be one, or the registry has such a sink already.
        """
        client = load("prometheus_client")
        self._registry = client.CollectorRegistry() if registry is None else registry
        self._collector: _Collector | None = _Collector(
            load("prometheus_client.core"), _checked(labels or {})
        )
        self._registry.register(self._collector)
        self._server: Any = None
        self.port: int | None = None
        if port is None:
            return
        try:
            self._server, self._thread = client.start_http_server(port, host, self._registry)
        except (OSError, OverflowError) as error:
            self._registry.unregister(self._collector)
            reason = getattr(error, "strerror", None) or error
            message = (
                f"cannot listen on port {port} of {host} ({reason}): pass another port, or 0 for any free one, "
                "and make this sink on one rank alone"
            )
            raise OSError(getattr(error, "errno", None), message) from error
        self.port = int(self._server.server_port)

    def write(
        self, judgement: Judgement, monitor: DriftMonitor, *, tokenizer: Tokenizer | None = None
    ) -> None:
        """Serves this step from now on.

        Raises:
            ValueError: the sink is closed.
        """
        if self._collector is None:
            raise ValueError(f"the Prometheus sink must be open to write step {judgement.step}, it is closed")
        self._collector.show(judgement, monitor)

    def close(self) -> None:
        """Stops serving."""
        if self._collector is None:
            return
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
        self._registry.unregister(self._collector)
        self._collector = None


class _Collector:
    """What a scrape asks; a step's families are replaced at once, so that a scrape sees one step."""

    def __init__(self, core: Any, labels: Mapping[str, str]) -> None:
        self._core = core
        self._names, self._values = list(labels), list(labels.values())
        self._counts = [0] * len(OCTAVES)  # of all steps, as is the sum
        self._sum = 0.0
        # Served from the start: Prometheus takes a first value for what was there before, and would miss the first step.
        self._families: list[Any] = [self._histogram()]

    def describe(self) -> Iterable[Any]:
        """Name by which a registry notices a second sink."""
        return [self._core.GaugeMetricFamily(f"{_PREFIX}step", "")]

    def collect(self) -> Iterable[Any]:
        """Families of the last step."""
        return self._families

    def show(self, judgement: Judgement, monitor: DriftMonitor) -> None:
        """Replaces what is collected."""
        metrics = judgement.metrics
        families = [
            self._gauge(name.replace("/", "_"), f"{name} of the last step, see docs/metrics.md", {(): value})
            for name, value in metrics.items()
        ]
        families.append(self._gauge("step", "last step that was judged", {(): judgement.step}))
        one_hot: dict[tuple[str, ...], float] = {
            (verdict,): float(verdict == judgement.verdict) for verdict in get_args(Verdict)
        }
        families.append(self._gauge("verdict", "1 for the verdict of the last step", one_hot, "verdict"))
        self._counts = [a + b for a, b in zip(self._counts, octaves(monitor), strict=True)]
        self._sum += metrics.get("dlogp/abs_mean", 0.0) * metrics["tokens/compared"]
        families.append(self._histogram())
        self._families = families

    def _gauge(self, name: str, meaning: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Any:
        family = self._core.GaugeMetricFamily(_PREFIX + name, meaning, labels=[*self._names, *labels])
        for label_values, value in values.items():
            family.add_metric([*self._values, *label_values], value)
        return family

    def _histogram(self) -> Any:
        meaning = "abs(dlogp) in nats of the compared tokens of all steps"
        family = self._core.HistogramMetricFamily(f"{_PREFIX}abs_dlogp", meaning, labels=self._names)
        seen, buckets = 0, []
        for bound, count in zip(OCTAVES, self._counts, strict=True):
            seen += count
            buckets.append(("+Inf" if math.isinf(bound) else repr(bound), seen))
        family.add_metric(self._values, buckets, self._sum)
        return family


def _checked(labels: Mapping[str, str]) -> dict[str, str]:
    for name in labels:
        if not _LABEL.fullmatch(name) or name in _TAKEN:
            raise ValueError(
                f"a label must be letters, digits and _, begin with no digit and no __, and be none of {_TAKEN}, "
                f"got {name!r}"
            )
    return {name: str(value) for name, value in labels.items()}

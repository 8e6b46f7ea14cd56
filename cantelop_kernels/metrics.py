"""Prometheus metrics of one daemon, in a registry of its own.

Layer 5. Counts and durations only; no user, key or code is in them.
(prometheus_client; names after prometheus.io/docs/practices/naming.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cantelop_kernels.pool import Observer
from cantelop_kernels.schema import PoolView

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics(Observer):
    """Made once per daemon; `watch` before the first `text`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._claims = Counter(
            "cantelop_claims", "Sandboxes given to sessions", ["kind"], registry=self._registry
        )
        self._claim_seconds = Histogram(
            "cantelop_claim_seconds",
            "From the claim to a kernel that listens",
            ["kind"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._boots = Histogram(
            "cantelop_boot_seconds",
            "From nothing to a guest that answers",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._failures = Counter(
            "cantelop_boot_failures",
            "Boots that failed, by the step that did",
            ["step"],
            registry=self._registry,
        )

    def watch(
        self,
        pool: Callable[[], list[PoolView]],
        live: Callable[[], int],
        waiting: Callable[[], int],
    ) -> None:
        """Read these at every scrape."""
        self._registry.register(_Now(pool, live, waiting))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def booted(self, seconds: float) -> None:
        self._boots.observe(seconds)

    def boot_failed(self, step: str) -> None:
        self._failures.labels(step).inc()

    def claimed(self, warm: bool, seconds: float) -> None:
        kind = "warm" if warm else "cold"
        self._claims.labels(kind).inc()
        self._claim_seconds.labels(kind).observe(seconds)


class _Now(Collector):
    def __init__(
        self,
        pool: Callable[[], list[PoolView]],
        live: Callable[[], int],
        waiting: Callable[[], int],
    ) -> None:
        self._pool, self._live, self._waiting = pool, live, waiting

    def collect(self) -> Iterator[Metric]:
        yield _gauge("cantelop_sessions_live", "Sessions that have not ended", self._live())
        yield _gauge("cantelop_claims_waiting", "Claims that wait for room", self._waiting())
        yield from _shelves(self._pool())


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _shelves(views: Iterable[PoolView]) -> Iterator[Metric]:
    labels = ["image", "vcpus", "memory_mib"]
    ready = GaugeMetricFamily("cantelop_pool_ready", "Warm sandboxes", labels=labels)
    target = GaugeMetricFamily("cantelop_pool_target", "Wanted warm sandboxes", labels=labels)
    failing = GaugeMetricFamily("cantelop_pool_failures", "Failed boots in a row", labels=labels)
    for view in views:
        values = [view.image, str(view.vcpus), str(view.memory_mib)]
        ready.add_metric(values, view.ready)
        target.add_metric(values, view.target)
        failing.add_metric(values, view.failures)
    yield from (ready, target, failing)

"""Prometheus metrics, on our own registry. Label values come from the fleet and from enums, never from a client."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from disagg_router.errors import RequestError
from disagg_router.model import Decision, HandoffResult, InferenceRequest, Target
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.leases import LeaseBook
from disagg_router.routing.prefix_index import PrefixIndex

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60)


class Metrics:
    """Counts what happens; is the router's observer."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "disagg_requests_total", "Requests that ended.", ["path", "outcome"], registry=self.registry
        )
        self.in_flight = Gauge("disagg_requests_in_flight", "Requests being served now.", registry=self.registry)
        self.ttft = Histogram(
            "disagg_ttft_seconds",
            "Arrival to the first event with content; streams only.",
            ["path"],
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.decisions = Counter(
            "disagg_decisions_total", "Decisions taken, retries included.", ["path", "reason"], registry=self.registry
        )
        self.handoffs = Counter(
            "disagg_handoffs_total", "Handoffs made, by what became of them.", ["result"], registry=self.registry
        )
        self.leg_failures = Counter(
            "disagg_leg_failures_total",
            "Legs that failed on an instance.",
            ["instance", "code"],
            registry=self.registry,
        )

    def decided(self, request: InferenceRequest, decision: Decision) -> None:
        self.decisions.labels(decision.path.value, decision.reason.value).inc()

    def leg_failed(self, target: Target, error: RequestError) -> None:
        self.leg_failures.labels(target.instance, error.code.value).inc()

    def handoff(self, result: HandoffResult) -> None:
        self.handoffs.labels(result.value).inc()

    def watch(self, fleet: Callable[[], Fleet], leases: LeaseBook, index: PrefixIndex) -> None:
        """Add the gauges that are read off the fleet at scrape time; a gone instance's series go with it."""
        self.registry.register(_FleetCollector(fleet, leases, index))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    def __init__(self, fleet: Callable[[], Fleet], leases: LeaseBook, index: PrefixIndex) -> None:
        self._fleet, self._leases, self._index = fleet, leases, index

    def collect(self) -> Iterable[GaugeMetricFamily]:
        fleet = self._fleet()
        instances = GaugeMetricFamily(
            "disagg_instance_up", "1 for an instance that takes requests.", labels=["instance", "role", "state"]
        )
        for instance in fleet.instances.values():
            up = instance.state.value == "ready"
            instances.add_metric([instance.id, instance.role.value, instance.state.value], float(up))
        pairs = GaugeMetricFamily("disagg_pair_ready", "1 for a tested pair.", labels=["prefill", "decode", "state"])
        for pair, status in fleet.pairs.items():
            ready = status.state.value == "ready"
            pairs.add_metric([pair.prefill, pair.decode, status.state.value], float(ready))
        leases = GaugeMetricFamily("disagg_leases", "Leases held now.", labels=["kind", "instance"])
        for (kind, target), count in self._leases.held().items():
            leases.add_metric([kind.value, target.instance], float(count))
        return (instances, pairs, leases, *self._of_the_index())

    def _of_the_index(self) -> Iterable[GaugeMetricFamily]:
        stats = self._index.stats()
        figures = GaugeMetricFamily(
            "disagg_index", "The prefix index: entries now, and counts since the start.", labels=["what"]
        )
        for name in ("entries", "evictions", "stored", "lookups", "hits"):
            figures.add_metric([name], float(getattr(stats, name)))
        dropped = GaugeMetricFamily(
            "disagg_index_dropped", "Blocks that events announced and the index left out.", labels=["reason"]
        )
        for reason, count in stats.dropped.items():
            dropped.add_metric([reason.value], float(count))
        return (figures, dropped)

"""Prometheus metrics, on our own registry. Label values come from the fleet and from enums, never from a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from disagg_router.errors import RequestError
from disagg_router.model import Decision, HandoffResult, InferenceRequest, Target
from disagg_router.observability.gauges import FleetCollector, Readings, ReadingsCollector
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.leases import LeaseBook
from disagg_router.routing.prefix_index import PrefixIndex

# Of measured / predicted: the same distance to both sides of 1 on a logarithmic scale.
TTFT_ERROR_EDGES = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10)
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60)
_WAIT_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)

_MET: Mapping[bool | None, str] = MappingProxyType({True: "met", False: "missed", None: "unmeasured"})

M = TypeVar("M", bound=MetricWrapperBase)


class _Children(dict[tuple[str, ...], M], Generic[M]):
    """A metric's series by their label values: looked up without the lock and the checks of `labels`."""

    def __init__(self, metric: M) -> None:
        super().__init__()
        self._metric = metric

    def __missing__(self, labels: tuple[str, ...]) -> M:
        child = self[labels] = self._metric.labels(*labels)
        return child


class Metrics:
    """Counts what happens; is the router's observer."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.in_flight = Gauge("disagg_requests_in_flight", "Requests being served now.", registry=self.registry)
        self._requests = self._counter("requests_total", "Requests that ended.", "path", "outcome")
        self._decisions = self._counter("decisions_total", "Decisions taken, retries included.", "path", "reason")
        self._handoffs = self._counter("handoffs_total", "Handoffs made, by what became of them.", "result")
        self._leg_failures = self._counter("leg_failures_total", "Legs that failed.", "instance", "code")
        self._rejections = self._counter("rejections_total", "Requests this router answered with 429 or 503.", "code")
        self._early = self._counter(
            "early_rejections_total",
            "Those by prediction, before the longest wait was over.",
            "code",
        )
        self._objectives = self._counter(
            "objectives_total",
            "Requests that were decided on or rejected, by the objectives they met and missed; good: succeeded and"
            " missed none.",
            *("path", "ttft", "tpot", "max_gap", "good"),
        )
        self._ttft = self._histogram(
            "ttft_seconds", "Arrival to the first event with content; streams only.", _TTFT_BUCKETS_S, "path"
        )
        self._predicted = self._histogram(
            "ttft_predicted_seconds", "What was predicted for the same requests.", _TTFT_BUCKETS_S, "path"
        )
        self._error = self._histogram(
            "ttft_error_ratio", "Measured / predicted TTFT; 1 is a perfect prediction.", TTFT_ERROR_EDGES, "path"
        )
        self._queue_wait = Histogram(
            "disagg_queue_wait_seconds",
            "What a request that was decided on had waited in the queue.",
            buckets=_WAIT_BUCKETS_S,
            registry=self.registry,
        )

    # --- the router's observer ---

    def decided(self, request: InferenceRequest, decision: Decision) -> None:
        self._decisions[decision.path, decision.reason].inc()

    def leg_failed(self, target: Target, error: RequestError) -> None:
        self._leg_failures[target.instance, error.code].inc()

    def handoff(self, result: HandoffResult) -> None:
        self._handoffs[(result,)].inc()

    # --- the end of a request; `path` is "none" where nothing was decided ---

    def ended(self, path: str, outcome: str) -> None:
        self._requests[path, outcome].inc()

    def waited(self, queue_wait_s: float) -> None:
        self._queue_wait.observe(queue_wait_s)

    def first_content(self, path: str, ttft_s: float, predicted_s: float | None) -> None:
        self._ttft[(path,)].observe(ttft_s)
        if predicted_s:
            self._predicted[(path,)].observe(predicted_s)
            self._error[(path,)].observe(ttft_s / predicted_s)

    def objectives(self, path: str, met: tuple[bool | None, bool | None, bool | None], *, good: bool) -> None:
        """`met`: TTFT, TPOT, max gap; None where there was nothing to measure."""
        ttft, tpot, max_gap = met
        labels = (path, _MET[ttft], _MET[tpot], _MET[max_gap], "true" if good else "false")
        self._objectives[labels].inc()

    def rejected(self, code: str, *, early: bool) -> None:
        self._rejections[(code,)].inc()
        if early:
            self._early[(code,)].inc()

    # --- the page ---

    def watch(
        self, fleet: Callable[[], Fleet], leases: LeaseBook, index: PrefixIndex, readings: Readings | None = None
    ) -> None:
        """Add what is read at scrape time; a gone instance's series go with it."""
        self.registry.register(FleetCollector(fleet, leases, index))
        if readings is not None:
            self.registry.register(ReadingsCollector(fleet, readings))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> _Children[Counter]:
        return _Children(Counter(f"disagg_{name}", text, labels, registry=self.registry))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> _Children[Histogram]:
        return _Children(Histogram(f"disagg_{name}", text, labels, buckets=buckets, registry=self.registry))

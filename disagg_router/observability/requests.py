"""One record per request: its line in the log and its share of the metrics."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from disagg_router.model import Decision
from disagg_router.observability.metrics import Metrics

log = logging.getLogger("disagg_router.request")


@dataclass(slots=True)
class RequestRecord:
    """Filled in as the request goes; times on the injected clock. Holds ids, sizes and times, never content."""

    endpoint: str
    request_id: str
    arrived_s: float
    decision: Decision | None = None
    status: int = 0
    first_content_s: float | None = None
    sent_bytes: int = 0
    outcome: str = "ok"

    def decided(self, decision: Decision) -> None:
        """The last one counts: it is what happened."""
        self.decision = decision


class RequestRecorder:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def begin(self, endpoint: str, request_id: str, now_s: float) -> RequestRecord:
        self._metrics.in_flight.inc()
        return RequestRecord(endpoint, request_id, now_s)

    def end(self, record: RequestRecord, now_s: float) -> None:
        self._metrics.in_flight.dec()
        path = record.decision.path.value if record.decision else "none"
        self._metrics.requests.labels(path, record.outcome).inc()
        ttft_s = None if record.first_content_s is None else record.first_content_s - record.arrived_s
        if ttft_s is not None:
            self._metrics.ttft.labels(path).observe(ttft_s)
        if not log.isEnabledFor(logging.INFO):
            return
        decision = record.decision
        log.info(
            "%s %s status=%d outcome=%s path=%s reason=%s prefill=%s decode=%s ttft_ms=%s total_ms=%.1f bytes=%d",
            record.request_id,
            record.endpoint,
            record.status,
            record.outcome,
            path,
            decision.reason if decision else "-",
            decision.prefill.instance if decision and decision.prefill else "-",
            decision.decode.instance if decision else "-",
            "-" if ttft_s is None else f"{ttft_s * 1000:.1f}",
            (now_s - record.arrived_s) * 1000,
            record.sent_bytes,
        )

"""One record per request: its line in the log, its share of the metrics, its place in the decision log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from disagg_router.errors import ErrorCode
from disagg_router.interfaces import Reject
from disagg_router.model import Decision, Estimate, InferenceRequest
from disagg_router.observability.metrics import Metrics

log = logging.getLogger("disagg_router.request")

# What the router answers with 429 or 503 of its own.
REJECTIONS = frozenset(
    code.value
    for code in (
        ErrorCode.RATE_LIMITED,
        ErrorCode.QUEUE_FULL,
        ErrorCode.DECODE_FULL,
        ErrorCode.LINK_FULL,
        ErrorCode.PREFILL_FULL,
        ErrorCode.NO_DECODE_INSTANCE,
        ErrorCode.NO_PREFILL_INSTANCE,
        ErrorCode.DRAINING,
    )
)


class Met(NamedTuple):
    """Which objectives a request met; None where nothing could be measured."""

    ttft: bool | None = None
    tpot: bool | None = None
    max_gap: bool | None = None


@dataclass(slots=True)
class RequestRecord:
    """Filled in as the request goes; times on the injected clock. Holds ids, sizes and times, never content.

    `request` is the one that was decided on, its tokens counted. `max_gap_s` is the longest pause between two events
    with content, `output_tokens` what the engine says or the relay counted; both None while not known.
    """

    endpoint: str
    request_id: str
    arrived_s: float
    request: InferenceRequest | None = None
    decision: Decision | None = None
    status: int = 0
    first_content_s: float | None = None
    last_content_s: float | None = None
    max_gap_s: float | None = None
    output_tokens: int | None = None
    queue_wait_s: float = 0.0
    rejected_early: bool = False
    sent_bytes: int = 0
    outcome: str = "ok"
    ended_s: float | None = None

    def decided(self, decision: Decision, request: InferenceRequest | None = None) -> None:
        """The last one counts: it is what happened."""
        self.decision, self.request = decision, request or self.request

    def queued(self, wait_s: float) -> None:
        """May be told several times: a request that is decided on again may wait again."""
        self.queue_wait_s += wait_s

    def rejected(self, rejection: Reject) -> None:
        """Admission refused it: room is predicted to come too late, or its chance is below `reject_below`. The code is
        that of the error which the client gets."""
        self.rejected_early = True

    @property
    def path(self) -> str:
        return self.decision.path if self.decision else "none"

    @property
    def offered(self) -> bool:
        """Something was decided about it: not one that was no request in the first place."""
        return self.decision is not None or self.outcome in REJECTIONS

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_content_s is None else self.first_content_s - self.arrived_s

    @property
    def predicted(self) -> Estimate | None:
        """TTFT of the path taken."""
        return self.decision.ttft.get(self.decision.path) if self.decision else None

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - 1); None for answers of one token."""
        if self.first_content_s is None or self.last_content_s is None or (self.output_tokens or 0) < 2:
            return None
        return (self.last_content_s - self.first_content_s) / ((self.output_tokens or 0) - 1)

    @property
    def met(self) -> Met:
        if self.request is None:
            return Met()
        slo = self.request.slo
        return Met(
            _within(self.ttft_s, slo.ttft_s), _within(self.tpot_s, slo.tpot_s), _within(self.max_gap_s, slo.max_gap_s)
        )


class RequestRecorder:
    """`keep` is handed each record about which something was decided, once nobody changes it any more."""

    def __init__(self, metrics: Metrics, keep: Callable[[RequestRecord], None] | None = None) -> None:
        self._metrics, self._keep = metrics, keep

    def begin(self, endpoint: str, request_id: str, now_s: float) -> RequestRecord:
        self._metrics.in_flight.inc()
        return RequestRecord(endpoint, request_id, now_s)

    def end(self, record: RequestRecord, now_s: float) -> None:
        record.ended_s = now_s
        self._metrics.in_flight.dec()
        self._metrics.ended(record.path, record.outcome)
        if record.offered:
            self._count(record)
            if self._keep is not None:
                self._keep(record)
        if log.isEnabledFor(logging.INFO):
            _log(record, now_s)

    def _count(self, record: RequestRecord) -> None:
        metrics, path, met = self._metrics, record.path, record.met
        metrics.objectives(path, met, good=record.outcome == "ok" and False not in met)
        if record.outcome in REJECTIONS:
            metrics.rejected(record.outcome, early=record.rejected_early)
        if record.decision is None:
            return
        metrics.waited(record.queue_wait_s)
        if record.first_content_s is not None:
            predicted = record.predicted
            ttft_s = record.first_content_s - record.arrived_s
            metrics.first_content(path, ttft_s, predicted.mean_s if predicted else None)


def _log(record: RequestRecord, now_s: float) -> None:
    decision, predicted = record.decision, record.predicted
    log.info(
        "%s %s status=%d outcome=%s path=%s reason=%s prefill=%s decode=%s predicted_ms=%s ttft_ms=%s total_ms=%.1f"
        " bytes=%d",
        record.request_id,
        record.endpoint,
        record.status,
        record.outcome,
        record.path,
        decision.reason if decision else "-",
        decision.prefill.instance if decision and decision.prefill else "-",
        decision.decode.instance if decision else "-",
        _ms(predicted.mean_s if predicted else None),
        _ms(record.ttft_s),
        (now_s - record.arrived_s) * 1000,
        record.sent_bytes,
    )


def _within(measured_s: float | None, objective_s: float) -> bool | None:
    return None if measured_s is None else measured_s <= objective_s


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"

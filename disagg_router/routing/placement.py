"""From a request to a decision that was admitted and holds what it needs. Decided, checked and taken in one synchronous
step, so that no two requests can be promised the same room."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from disagg_router.errors import NoDecodeInstance
from disagg_router.interfaces import (
    Admission,
    AdmissionPolicy,
    Claim,
    PathPolicy,
    Reject,
    Reserved,
    RouteObserver,
    RouteRecord,
)
from disagg_router.model import Decision, InferenceRequest, Target
from disagg_router.policies.forecast import predicted
from disagg_router.policies.harm import chance_below
from disagg_router.routing.leases import DecodeLease, HandoffLease, PrefillLease
from disagg_router.routing.loads import Loads
from disagg_router.routing.queue import FairQueue, NotYet, room_of
from disagg_router.routing.views import Views
from disagg_router.view import ClusterView


@dataclass(frozen=True, slots=True)
class Placement:
    """Entered by whoever serves it; each lease ends at its own time, all of them at the latest when it is left."""

    decision: Decision
    claim: Claim
    decode: DecodeLease
    prefill: PrefillLease
    handoff: HandoffLease | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.prefill.release()
        if self.handoff is not None:
            self.handoff.release()
        self.decode.release()


class Judged(NamedTuple):
    """`request` as it was decided on, with the wait so far and a tiebreak."""

    request: InferenceRequest
    view: ClusterView
    decision: Decision
    admission: Admission


class Placer:
    """`queue` holds those for whom there is no room yet. `max_gap_s` is the configured objective: a prefill that makes
    streams pause for longer makes its target a bad place to decode."""

    def __init__(
        self,
        *,
        policy: PathPolicy,
        admission: AdmissionPolicy,
        queue: FairQueue,
        views: Views,
        loads: Loads,
        observer: RouteObserver,
        max_gap_s: float,
        now_s: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._policy, self._admission, self._queue = policy, admission, queue
        self._views, self._observer, self._now_s, self._rng = views, observer, now_s, rng
        self.loads, self._max_gap_s = loads, max_gap_s

    @property
    def needs_token_count(self) -> bool:
        return self._policy.needs_token_count

    def judge(self, request: InferenceRequest, arrived_s: float) -> Judged:
        """What would become of it now. Raises NoDecodeInstance and what else the policy raises."""
        now_s = self._now_s()
        view = self._views.now(now_s)
        asked = dataclasses.replace(request, tiebreak=self._rng.random(), waited_s=now_s - arrived_s)
        decision = self._policy.decide(asked, view)
        if decision.path not in decision.ttft and (ttft := predicted(asked, view, decision)) is not None:
            decision = dataclasses.replace(decision, ttft={**decision.ttft, decision.path: ttft})
        return Judged(asked, view, decision, self._admission.check(asked, decision, view))

    async def place(self, request: InferenceRequest, arrived_s: float, record: RouteRecord) -> Placement:
        """Waits for room. Raises NoRoom, QueueFull, and what the policy raises."""

        def attempt(set_aside: frozenset[Target]) -> Placement | NotYet:
            judged = self.judge(request, arrived_s)
            if isinstance(judged.admission, Reject):
                self._tell(judged, record)
                record.rejected(judged.admission)
            room = room_of(judged.admission, judged.decision, set_aside)
            if isinstance(room, NotYet) and isinstance(judged.admission, Reserved):
                judged, room = self._elsewhere(judged, room, set_aside, arrived_s)
            if isinstance(room, NotYet):
                return room
            self._tell(judged, record)
            return self._take(judged, room)

        queued_s = self._now_s()
        try:
            # Half of its objective may go into being overtaken by what fits where it does not.
            patience_s = request.slo.ttft_s / 2
            return await self._queue.admitted(attempt, priority=request.priority, patience_s=patience_s)
        finally:
            record.queued(self._now_s() - queued_s)

    def freed(self) -> None:
        """Something that was held is free again: whoever waits for it may try."""
        self._queue.poke()

    def _elsewhere(
        self, judged: Judged, not_yet: NotYet, set_aside: frozenset[Target], arrived_s: float
    ) -> tuple[Judged, Claim | NotYet]:
        """What it would take is kept for another: is there something else, without the targets that are?"""
        request = dataclasses.replace(judged.request, excluded=judged.request.excluded | set_aside)
        try:
            again = self.judge(request, arrived_s)
        except NoDecodeInstance:
            return judged, not_yet
        if not isinstance(again.admission, Reserved):
            return judged, not_yet
        return again, room_of(again.admission, again.decision, set_aside)

    def _tell(self, judged: Judged, record: RouteRecord) -> None:
        self._observer.decided(judged.request, judged.decision)
        record.decided(judged.decision, judged.request)

    def _take(self, judged: Judged, claim: Claim) -> Placement:
        """Everything that the claim names."""
        request, view, decision, _ = judged
        prefiller, leases = decision.prefiller, self.loads.leases
        timing, cached_tokens = view.costs.of(prefiller), (request.prompt_tokens or 0) - claim.prefill_tokens
        times = timing.prefill(claim.prefill_tokens, cached_tokens)
        self.loads.demand.placed(
            prefiller,
            predicted_s=claim.prefill_s,
            stalls=1.0 - chance_below(self._max_gap_s, times.pause_s, times.pause_s * timing.prefill_sd),
            steps=timing.steps(claim.prefill_tokens, 0),
            kv_bytes=(request.prompt_tokens or 0) * view.costs.kv_bytes_per_token,
            now_s=view.now_s,
        )
        return Placement(
            decision=decision,
            claim=claim,
            decode=leases.decode(decision.decode, claim, streamed=request.stream),
            prefill=leases.prefill(prefiller, claim, observed=decision.prefill is not None or request.stream),
            handoff=leases.handoff(decision.prefill, decision.decode, claim) if decision.prefill else None,
        )

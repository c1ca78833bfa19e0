"""How long a target's decode steps take, read off the streams that ran undisturbed between two looks."""

from __future__ import annotations

from typing import NamedTuple

from disagg_router.interfaces import CostModel
from disagg_router.model import Target
from disagg_router.routing.leases import LeaseBook
from disagg_router.routing.prefill_queue import Beside
from disagg_router.routing.streams import StreamBook, TargetStreams

LEAST_STEPS = 8  # fewer say too little: a look falls anywhere within a step


class _Look(NamedTuple):
    """Equal `state`: the same streams ran, and no prefill was placed, since the other look."""

    state: tuple[int, int, int]
    beside: Beside
    tokens: int
    last_s: float


class StepTimer:
    """Tells the cost model; skips what ran beside a prefill, or beside answers whose tokens nobody sees."""

    def __init__(self, costs: CostModel, streams: StreamBook, leases: LeaseBook) -> None:
        self._costs, self._streams, self._leases = costs, streams, leases
        self._looks: dict[Target, _Look] = {}

    def tick(self, now_s: float) -> None:
        """A look at every target; one that has made too few steps since the last look keeps that one."""
        looks = {}
        for streams in self._streams.by_target():
            new = self._look(streams)
            if new is None:
                continue
            old = self._looks.get(streams.target)
            if old is not None and old.state == new.state:
                steps = (new.tokens - old.tokens) / len(streams.open)
                if steps < LEAST_STEPS:
                    new = old
                else:
                    self._report(streams.target, old, new, steps, now_s)
            looks[streams.target] = new
        self._looks = looks

    def _look(self, streams: TargetStreams) -> _Look | None:
        """None where the streams are not all there is."""
        leases = self._leases.of(streams.target)
        taken = foreign = 0
        if leases is not None:
            if len(leases.prefills) or leases.unseen:
                return None
            taken, foreign = leases.prefills_taken, leases.foreign
        beside = self._leases.beside(streams.target)
        return _Look((streams.version, taken, foreign), beside, streams.context_tokens, streams.last_s)

    def _report(self, target: Target, old: _Look, new: _Look, steps: float, now_s: float) -> None:
        context_tokens = (old.beside.context_tokens + new.beside.context_tokens) / 2
        self._costs.stepped(target, new.beside.running, context_tokens, (new.last_s - old.last_s) / steps, now_s)

"""What is going on at each target: the view's loads, built from the books and kept until these change."""

from __future__ import annotations

import math
from collections.abc import Callable

from disagg_router.interfaces import CostModel, EngineLoad
from disagg_router.model import Target
from disagg_router.routing.demand import DemandBook
from disagg_router.routing.leases import LeaseBook
from disagg_router.routing.steps import StepTimer
from disagg_router.routing.streams import StreamBook
from disagg_router.view import TargetLoad

KEPT_S = 0.1  # a load is good for so long when nothing comes or goes
BUILT_AT_ONCE = 2  # so many of those that are older are built anew by one decision; `tick` builds the rest


class Loads:
    """Owns the books. Call `tick` about every 0.25 s."""

    def __init__(self, *, costs: CostModel, now_s: Callable[[], float]) -> None:
        self._touched: set[Target] = set()
        self._now_s, self._costs = now_s, costs
        self.streams = StreamBook(costs, self._touched)
        self.leases = LeaseBook(costs=costs, streams=self.streams, touched=self._touched, now_s=now_s)
        self.demand = DemandBook(touched=self._touched, now_s=now_s())
        self._steps = StepTimer(costs, self.streams, self.leases)
        self._order: tuple[Target, ...] = ()
        self._place: dict[Target, int] = {}
        self._loads: list[TargetLoad] = []
        self._built_s: list[float] = []
        self._next = 0  # whose turn it is to be built anew
        self._all: tuple[TargetLoad, ...] | None = None

    def all(self, targets: tuple[Target, ...]) -> tuple[TargetLoad, ...]:
        """In the order of `targets`. A load that has not changed is the same object as before, the tuple as well.

        Cheap while `targets` is the same object: make a new one only when the fleet changes.
        """
        now_s = self._now_s()
        if targets is not self._order:
            self._arrange(targets)
        if self._touched:
            for target in self._touched & self._place.keys():
                self._build_anew(self._place[target], now_s)
            self._touched.clear()
        self._build_old(now_s, min(BUILT_AT_ONCE, len(targets)))
        if self._all is None:
            self._all = tuple(self._loads)
        return self._all

    def of(self, target: Target) -> TargetLoad:
        """One target's load, fresh."""
        return self._build(target, self._now_s())

    def sized(self, target: Target, capacity_tokens: int | None) -> None:
        """How much KV fits there, as long as no probe has said it: from its first request on a target has a bound."""
        if capacity_tokens is not None:
            self.leases.sized(target, capacity_tokens)

    def reconcile(self, target: Target, engine: EngineLoad) -> None:
        """Take over what a probe found; see LeaseBook.reconcile."""
        self.leases.reconcile(target, engine)

    def tick(self) -> None:
        """Report what was observed to the cost model and look at the streams."""
        now_s = self._now_s()
        self.leases.settle()
        self._steps.tick(now_s)
        self.streams.look(now_s)
        self._build_old(now_s, len(self._order))

    def forget(self, target: Target) -> None:
        """Its engine is gone, or is another process now. The cost model has a `forget` of its own."""
        self.leases.forget(target)
        self.demand.forget(target)

    def _arrange(self, targets: tuple[Target, ...]) -> None:
        self._order, self._all, self._next = targets, None, 0
        self._place = {target: place for place, target in enumerate(targets)}
        self._loads, self._built_s = [_IDLE] * len(targets), [-math.inf] * len(targets)
        self._build_old(self._now_s(), len(targets))

    def _build_old(self, now_s: float, count: int) -> None:
        """Of the next `count` targets, those whose load is too old."""
        for _ in range(count):
            place = self._next
            self._next = (place + 1) % len(self._order)
            if now_s - self._built_s[place] >= KEPT_S:
                self._build_anew(place, now_s)

    def _build_anew(self, place: int, now_s: float) -> None:
        self._loads[place] = self._build(self._order[place], now_s)
        self._built_s[place] = now_s
        self._all = None

    def _build(self, target: Target, now_s: float) -> TargetLoad:
        leases = self.leases.of(target)
        streams = self.streams.load(target, now_s)
        demand = self.demand.of(target, now_s)
        if leases is None:
            if not streams.running and not demand.prefill_s:
                return _IDLE
            return TargetLoad(
                streams=streams,
                prefill_share=demand.prefill_s,
                prefill_steps_per_s=demand.steps,
                stalls_per_s=demand.stalls,
            )
        prefills, over_bytes = leases.prefills, 0.0
        if streams.over_tokens:
            over_bytes = streams.over_tokens * self._costs.snapshot(now_s).kv_bytes_per_token
        return TargetLoad(
            prefills=len(prefills),
            handoffs=leases.answered,
            decodes=leases.decodes.count,
            foreign=leases.foreign,
            prefill_tokens=prefills.tokens,
            prefills_end_s=prefills.end_s(now_s) if len(prefills) else -math.inf,
            prefills_sd_s=prefills.sd_s,
            streams=streams,
            kv_capacity_bytes=leases.kv_capacity_bytes,
            kv_free_bytes=max(0.0, leases.kv_free_bytes - over_bytes),
            pinned_bytes=leases.pinned.total,
            out_bytes=leases.link.outward.total,
            in_bytes=leases.link.inward.total,
            prefill_share=demand.prefill_s,
            prefill_steps_per_s=demand.steps,
            stalls_per_s=demand.stalls,
        )


_IDLE = TargetLoad()

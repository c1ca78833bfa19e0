"""A fleet at work, for the view of a decision: the router's own books, filled with made-up requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from disagg_router.interfaces import Claim, EngineLoad, PrefillWork
from disagg_router.model import Instance, InstanceId, InstanceState, Pair, PairState, Role, Slo, Target
from disagg_router.routing.fleet import Fleet, PairStatus, plan_pairs
from disagg_router.routing.leases import DecodeLease, PrefillLease
from disagg_router.routing.loads import Loads
from disagg_router.routing.streams import Stream
from disagg_router.routing.views import Views
from disagg_router.timing import CostSnapshot, attention
from disagg_router.view import ClusterView

STEP_S = 0.005  # between decisions: 200 a second
CHANGES = 1  # requests that end, and others that begin, between two decisions: each decision begins one
PER_TARGET = 16  # requests, on average
IDLE = 0.25  # of the targets
PREFILLS = 0.1  # of the requests are still being prefilled
STEPS_PER_TICK = 50
KV_CAPACITY_TOKENS = 450_000


@dataclass(slots=True)
class _Request:
    """One under way: `stream` from its first byte on, `prefill` before."""

    decode: DecodeLease
    stream: Stream | None
    prefill: PrefillLease | None

    def end(self) -> None:
        if self.prefill is not None:
            self.prefill.release()
        if self.stream is not None:
            self.stream.close()
        self.decode.release()


class FixedCosts:
    """A cost model that has learned what it will ever know."""

    def __init__(self, snapshot: CostSnapshot) -> None:
        self._snapshot = snapshot

    def snapshot(self, now_s: float) -> CostSnapshot:
        return self._snapshot

    def prefilled(self, target: Target, work: PrefillWork, seconds: float, now_s: float) -> None: ...

    def stepped(self, target: Target, running: float, context_tokens: float, seconds: float, now_s: float) -> None: ...

    def handed_off(self, pair: Pair, moved_bytes: float, seconds: float, now_s: float) -> None: ...

    def transferred(self, decode: InstanceId, moved_bytes: float, seconds: float, now_s: float) -> None: ...

    def forget(self, target: Target) -> None: ...


class Traffic:
    """`step` between two decisions; `view` is what a router does at the start of each."""

    def __init__(self, targets: Sequence[Target], costs: CostSnapshot, slo: Slo, rng: random.Random) -> None:
        self._rng, self._costs, self._slo = rng, costs, slo
        self._now_s, self._steps = 0.0, 0
        self._busy = rng.sample(targets, max(1, round(len(targets) * (1 - IDLE))))
        fleet = _fleet(targets)
        model = FixedCosts(costs)
        self._loads = Loads(costs=model, now_s=lambda: self._now_s)
        self._views = Views(lambda: fleet, self._loads, model)
        for target in targets:
            self._loads.reconcile(target, EngineLoad(0, 0, 0.0, KV_CAPACITY_TOKENS))
        self._requests = [self._begin() for _ in range(PER_TARGET * len(targets))]

    def view(self) -> ClusterView:
        return self._views.now(self._now_s)

    def step(self) -> None:
        """A moment later: every stream has its next token, some requests have ended and others begun."""
        self._now_s += STEP_S
        self._steps += 1
        for request in self._requests:
            if request.stream is not None:
                request.stream.count(1, self._now_s)
        for _ in range(CHANGES):
            place = self._rng.randrange(len(self._requests))
            self._requests[place].end()
            self._requests[place] = self._begin()
        if self._steps % STEPS_PER_TICK == 0:
            self._loads.tick()

    def _begin(self) -> _Request:
        target, prompt_tokens = self._rng.choice(self._busy), self._rng.randrange(100, 8000)
        kv_bytes = prompt_tokens * self._costs.kv_bytes_per_token
        seconds = self._costs.prefill_s(target, prompt_tokens, 0, 0, 0).mean_s
        claim = Claim(
            kv_bytes, prefill_tokens=prompt_tokens, prefill_attention=attention(prompt_tokens, 0), prefill_s=seconds
        )
        self._loads.demand.placed(
            target, predicted_s=seconds, steps=1, stalls=float(seconds > 0.5), kv_bytes=kv_bytes, now_s=self._now_s
        )
        decode = self._loads.leases.decode(target, claim, streamed=True)
        if self._rng.random() < PREFILLS:
            return _Request(decode, None, self._loads.leases.prefill(target, claim, observed=True))
        stream = self._loads.streams.open(
            target,
            self._slo,
            prompt_tokens=prompt_tokens,
            expected_tokens=float(self._rng.randrange(32, 512)),
            max_tokens=None,
            now_s=self._now_s,
        )
        return _Request(decode, stream, None)


def _fleet(targets: Sequence[Target]) -> Fleet:
    """All unified and ready, paired as the brain would."""
    instances = {
        target.instance: Instance(target.instance, Role.UNIFIED, f"http://{target.instance}", InstanceState.READY, "1")
        for target in targets
    }
    pairs = dict.fromkeys(plan_pairs(instances.values(), soft_roles=True), PairStatus(PairState.READY))
    return Fleet(instances, pairs, soft_roles=True)

"""The fleet as the brain publishes it: an immutable picture that the router reads on every request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from disagg_router.model import (
    ClusterView,
    Instance,
    InstanceId,
    InstanceState,
    Pair,
    PairState,
    Target,
    TargetLoad,
    TargetView,
)

PARTNERS = 8  # at most so many pairs per instance: handshakes and tests are not free


@dataclass(frozen=True, slots=True)
class PairStatus:
    """`reason` says why a pair is refused or failed."""

    state: PairState
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """Instances with the state, incarnation and fingerprint the brain found, and the state of every pair."""

    instances: Mapping[InstanceId, Instance] = field(default_factory=dict)
    pairs: Mapping[Pair, PairStatus] = field(default_factory=dict)

    def ready(self) -> list[Instance]:
        return [i for i in self.instances.values() if i.state is InstanceState.READY]

    def can_serve_whole(self) -> bool:
        return any(i.role.decodes for i in self.ready())

    def settled(self) -> bool:
        """No pair between ready instances still waits for its first test."""
        ready = {i.id for i in self.ready()}
        waiting = (PairState.UNTESTED, PairState.TESTING)
        return not any(s.state in waiting and {p.prefill, p.decode} <= ready for p, s in self.pairs.items())

    def view(self, now_s: float, load: Callable[[Target], TargetLoad]) -> ClusterView:
        """What a policy may look at now; `load` gives what this router's leases hold on a target."""
        targets = [(Target(i.id), i.role) for i in self.ready()]
        return ClusterView(
            now_s=now_s,
            targets=tuple(TargetView(target, role, load(target)) for target, role in targets),
            pairs=frozenset(pair for pair, status in self.pairs.items() if status.state is PairState.READY),
        )


def plan_pairs(instances: Iterable[Instance], partners: int = PARTNERS) -> tuple[Pair, ...]:
    """The pairs worth testing: every prefill with every decode while they are few, a ring of neighbours otherwise.

    Each decode gets the `partners` prefills that follow its own place on the ring, so each prefill's pairs stay
    within `partners` as well when there are at least as many prefills as decodes.
    """
    ordered = sorted(instances, key=lambda i: i.id)
    prefills = [i for i in ordered if i.role.prefills]
    decodes = [i for i in ordered if i.role.decodes]
    per_decode = min(partners, len(prefills), max(1, partners * len(prefills) // max(1, len(decodes))))
    pairs: list[Pair] = []
    for place, decode in enumerate(decodes):
        # A unified instance stands on both sides and is no partner of itself: look one place further.
        ring = [prefills[(place + step) % len(prefills)] for step in range(len(prefills))]
        pairs += [Pair(p.id, decode.id) for p in [p for p in ring if p.id != decode.id][:per_decode]]
    return tuple(pairs)

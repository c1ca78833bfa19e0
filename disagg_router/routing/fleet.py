"""The fleet as the brain publishes it: an immutable picture that the router reads on every request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from disagg_router.model import Instance, InstanceId, InstanceState, Pair, PairState, Target

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
    soft_roles: bool = False  # the policy and the connector let any instance do either part

    def ready(self) -> list[Instance]:
        return [i for i in self.instances.values() if i.state is InstanceState.READY]

    def can_serve_whole(self) -> bool:
        return any(self.soft_roles or i.role.decodes for i in self.ready())

    def tested_pairs(self) -> list[Pair]:
        return [pair for pair, status in self.pairs.items() if status.state is PairState.READY]

    def settled(self) -> bool:
        """No pair between ready instances still waits for its first test."""
        ready = {i.id for i in self.ready()}
        waiting = (PairState.UNTESTED, PairState.TESTING)
        return not any(s.state in waiting and {p.prefill, p.decode} <= ready for p, s in self.pairs.items())


def partners_of(pairs: Iterable[Pair], targets: Sequence[Target]) -> Mapping[InstanceId, tuple[int, ...]]:
    """Decode instance -> the places in `targets` of the prefills of its pairs."""
    places: dict[InstanceId, list[int]] = defaultdict(list)
    for place, target in enumerate(targets):
        places[target.instance].append(place)
    found: dict[InstanceId, list[int]] = defaultdict(list)
    for pair in pairs:
        found[pair.decode] += places[pair.prefill]
    return {decode: tuple(sorted(prefills)) for decode, prefills in found.items() if prefills}


def plan_pairs(
    instances: Iterable[Instance], partners: int = PARTNERS, *, soft_roles: bool = False
) -> tuple[Pair, ...]:
    """The pairs worth testing: every prefill with every decode while they are few, a ring of neighbours otherwise. With
    soft roles every instance is both.

    Each decode gets the `partners` prefills that follow its own place on the ring, so each prefill's pairs stay
    within `partners` as well when there are at least as many prefills as decodes.
    """
    ordered = sorted(instances, key=lambda i: i.id)
    prefills = [i for i in ordered if soft_roles or i.role.prefills]
    decodes = [i for i in ordered if soft_roles or i.role.decodes]
    per_decode = min(partners, len(prefills), max(1, partners * len(prefills) // max(1, len(decodes))))
    pairs: list[Pair] = []
    for place, decode in enumerate(decodes):
        # A unified instance stands on both sides and is no partner of itself: look one place further.
        ring = [prefills[(place + step) % len(prefills)] for step in range(len(prefills))]
        pairs += [Pair(p.id, decode.id) for p in [p for p in ring if p.id != decode.id][:per_decode]]
    return tuple(pairs)

"""What should be done next, as a function of its arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from disagg_router.interfaces import Action, Observed, Start, Stop
from disagg_router.model import InstanceId, InstanceSpec


@dataclass(frozen=True, slots=True)
class Limits:
    """Back-off doubles from the first to the last value; `steady_s` of being ready forgives earlier failures."""

    first_backoff_s: float = 1.0
    last_backoff_s: float = 60.0
    steady_s: float = 120.0
    start_limit_s: float = 1800.0

    def backoff_s(self, failures: int) -> float:
        # The exponent is capped too: 2.0 ** 2000 overflows.
        return min(self.last_backoff_s, self.first_backoff_s * 2.0 ** min(failures - 1, 30))


@dataclass(frozen=True, slots=True)
class Record:
    """What is remembered of one instance. `incarnation` is the one started last; None while there is none."""

    starts: int = 0
    incarnation: str | None = None
    started_s: float = 0.0
    ready_since_s: float | None = None
    failures: int = 0
    retry_at_s: float = 0.0


Memory = Mapping[InstanceId, Record]


@dataclass(frozen=True, slots=True)
class World:
    """What is seen: incarnations, and which of them answer. `boot` tells this controller's incarnations apart."""

    observed: tuple[Observed, ...]
    ready: Collection[str]
    now_s: float
    boot: str = "0"


@dataclass(frozen=True, slots=True)
class Plan:
    actions: tuple[Action, ...]
    memory: Memory = field(default_factory=dict)


def reconcile(desired: Iterable[InstanceSpec], world: World, memory: Memory, limits: Limits) -> Plan:
    """Reflect what the world says, then decide the next step.

    Reflect, per instance:
      1. its incarnation answers            -> ready since now, unless it was; `steady_s` of it forgives failures
      2. its incarnation stopped answering  -> it is left alone: an engine under load answers late too
      3. its incarnation ended or is gone   -> one more failure, retry after the back-off
      4. its incarnation never answered within `start_limit_s` -> as 3
    Decide:
      5. no incarnation, back-off over      -> Start the next one
      6. an incarnation that ended          -> Stop, which frees what was reserved for it
      7. an incarnation that is not the one remembered (a duplicate, an overdue one) -> Stop
      8. an incarnation of an instance that is not desired -> Stop; once gone it is forgotten
    At most one Start per instance, and never while another incarnation of it is still to be stopped.
    """
    specs = {spec.id: spec for spec in desired}
    reflected = {
        id: _reflect(memory.get(id, Record()), [seen for seen in world.observed if seen.id == id], world, limits)
        for id in specs
    }
    stops = [
        Stop(seen.id, seen.incarnation)
        for seen in world.observed
        if seen.id not in specs or not seen.running or seen.incarnation != reflected[seen.id].incarnation
    ]
    stopping = {stop.id for stop in stops}
    starts: list[Start] = []
    for id, spec in specs.items():
        record = reflected[id]
        if record.incarnation is None and world.now_s >= record.retry_at_s and id not in stopping:
            incarnation = f"{id}-{world.boot}-{record.starts + 1}"
            starts.append(Start(spec, incarnation))
            reflected[id] = replace(
                record,
                starts=record.starts + 1,
                incarnation=incarnation,
                started_s=world.now_s,
                ready_since_s=None,
            )
    return Plan((*stops, *starts), reflected)


def _reflect(record: Record, seen: list[Observed], world: World, limits: Limits) -> Record:
    if record.incarnation is None:
        return record
    running = any(one.running for one in seen if one.incarnation == record.incarnation)
    ready = running and record.incarnation in world.ready
    answered_once = ready or record.ready_since_s is not None
    overdue = not answered_once and world.now_s - record.started_s > limits.start_limit_s
    if not running or overdue:
        failures = record.failures + 1
        return replace(
            record,
            incarnation=None,
            ready_since_s=None,
            failures=failures,
            retry_at_s=world.now_s + limits.backoff_s(failures),
        )
    if not ready:
        return record
    since_s = world.now_s if record.ready_since_s is None else record.ready_since_s
    steady = world.now_s - since_s >= limits.steady_s
    return replace(record, ready_since_s=since_s, failures=0 if steady else record.failures)

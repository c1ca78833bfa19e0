"""Pairs: compared by fingerprint, tested before traffic, tested again when an end of theirs is another incarnation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from disagg_router.connectors.compatibility import incompatibility
from disagg_router.errors import DisaggError
from disagg_router.interfaces import Clock, PairTest
from disagg_router.model import Instance, InstanceId, InstanceState, Pair, PairState
from disagg_router.routing.fleet import PairStatus, plan_pairs

log = logging.getLogger(__name__)

CONCURRENT_TESTS = 2  # tests cost prefill compute on engines that serve
LONGEST_BACKOFF = 10  # times the retest interval


@dataclass(slots=True)
class _Record:
    ends: tuple[Instance, Instance]
    status: PairStatus
    failures: int = 0
    due_s: float = 0.0
    test: asyncio.Task[None] | None = None


class PairTester:
    """Owns the state of every pair. `update` tells it the instances, `run` tests what is due."""

    def __init__(
        self,
        test: PairTest,
        *,
        retest_s: float,
        limit_s: float,
        soft_roles: bool,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self._test, self._retest_s, self._limit_s, self._soft_roles = test, retest_s, limit_s, soft_roles
        self._clock, self._changed = clock, changed
        self._records: dict[Pair, _Record] = {}
        self._instances: Mapping[InstanceId, Instance] = {}
        self._wake = asyncio.Event()

    def statuses(self) -> dict[Pair, PairStatus]:
        return {pair: record.status for pair, record in self._records.items()}

    def update(self, instances: Mapping[InstanceId, Instance]) -> None:
        """Plan pairs anew. A pair keeps its state as long as both ends stay the incarnations that were tested.

        An instance that does not answer at the moment keeps its pairs: they are unusable with it, and good again
        when the same process comes back.
        """
        records: dict[Pair, _Record] = {}
        for pair in plan_pairs(instances.values(), soft_roles=self._soft_roles):
            ends = instances[pair.prefill], instances[pair.decode]
            old = self._records.get(pair)
            away = not all(_ready(end) for end in ends)
            if old is not None and (away or _identity(old.ends) == _identity(ends)):
                records[pair] = old
            else:
                records[pair] = _Record(ends, _first_status(ends))
                self._announce(pair, records[pair].status)
        for pair, old in self._records.items():
            if old.test is not None and records.get(pair) is not old:
                old.test.cancel()  # it speaks of a process that is gone, and holds a slot
        self._records, self._instances = records, instances
        self._wake.set()

    async def run(self) -> None:
        slots = asyncio.Semaphore(CONCURRENT_TESTS)
        async with asyncio.TaskGroup() as tests:
            while True:
                self._wake.clear()
                for pair in self._due():
                    record = self._records[pair]
                    self._set(pair, record, PairStatus(PairState.TESTING))
                    record.test = tests.create_task(self._run_one(pair, record, slots))
                await self._sleep()

    def _due(self) -> list[Pair]:
        """At most one per decode instance: the test counts what that engine pulls, and must not count another's."""
        now_s = self._clock.now_s()
        waiting = (PairState.UNTESTED, PairState.FAILED)
        busy = {pair.decode for pair, record in self._records.items() if record.status.state is PairState.TESTING}
        due: dict[InstanceId, Pair] = {}
        for pair, record in self._records.items():
            ends_ready = all(_ready(self._instances[end]) for end in (pair.prefill, pair.decode))
            if record.status.state in waiting and record.due_s <= now_s and ends_ready and pair.decode not in busy:
                due.setdefault(pair.decode, pair)
        return list(due.values())

    async def _sleep(self) -> None:
        """Until something changes, or the next failed pair is due."""
        now_s = self._clock.now_s()
        later = [r.due_s for r in self._records.values() if r.status.state is PairState.FAILED and r.due_s > now_s]
        tasks: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._wake.wait())}
        if later:
            tasks.add(asyncio.ensure_future(self._clock.sleep(min(later) - now_s)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _run_one(self, pair: Pair, record: _Record, slots: asyncio.Semaphore) -> None:
        async with slots:
            reason: str | None = None
            try:
                async with asyncio.timeout(self._limit_s):
                    await self._test(*record.ends)
            except TimeoutError:
                reason = f"the self-test took longer than {self._limit_s:g} s"
            except DisaggError as exc:
                reason = str(exc)
            except Exception as exc:
                # An answer nobody foresaw costs this pair its traffic, not the router its life.
                log.exception("the self-test of %s -> %s failed in an unforeseen way", pair.prefill, pair.decode)
                reason = f"the self-test failed in an unforeseen way ({type(exc).__name__})"
        if reason is None:
            record.failures = 0
            self._set(pair, record, PairStatus(PairState.READY))
        else:
            backoff = min(2**record.failures, LONGEST_BACKOFF)
            record.failures += 1
            record.due_s = self._clock.now_s() + self._retest_s * backoff
            self._set(pair, record, PairStatus(PairState.FAILED, reason))
        self._wake.set()

    def _set(self, pair: Pair, record: _Record, status: PairStatus) -> None:
        record.status = status
        if self._records.get(pair) is record:  # else an end was replaced while the test ran
            self._announce(pair, status)
            self._changed()

    def _announce(self, pair: Pair, status: PairStatus) -> None:
        level = logging.WARNING if status.reason else logging.INFO
        note = f": {status.reason}" if status.reason else ""
        log.log(level, "pair %s -> %s is %s%s", pair.prefill, pair.decode, status.state, note)


def _ready(instance: Instance) -> bool:
    return instance.state is InstanceState.READY


def _identity(ends: Iterable[Instance]) -> list[tuple[object, ...]]:
    return [(end.incarnation, end.url, end.fingerprint) for end in ends]


def _first_status(ends: tuple[Instance, Instance]) -> PairStatus:
    if not all(_ready(end) for end in ends):
        return PairStatus(PairState.UNTESTED)
    reason = incompatibility(ends[0].fingerprint, ends[1].fingerprint)
    return PairStatus(PairState.REFUSED, reason) if reason else PairStatus(PairState.UNTESTED)

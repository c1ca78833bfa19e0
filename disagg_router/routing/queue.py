"""The fair queue: who waits for room, in which order they try again, and when they are told that it was in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile, zip_longest
from typing import TypeVar

from disagg_router.errors import ErrorCode, NoRoom, QueueFull, whole_seconds
from disagg_router.interfaces import Admission, Claim, Clock, Reject, Wait
from disagg_router.model import Decision, Target

FRONT = 8  # so many of those who wait may try at a time: one may fit where another does not,
OTHERS = 4  # and when none of them does, so many of those behind: all of the front may be too large
RETRY_S = 0.25  # what frees by the mere passing of time pokes nobody
SOONEST_RETRY_S = 0.05
REST = 4.0  # times what the tries of a round took: at overload they may have a fifth of the router's time
T = TypeVar("T")
NOTHING: frozenset[Target] = frozenset()


@dataclass(frozen=True, slots=True)
class NotYet:
    """There is no room now; `targets` are those that have to empty for it."""

    wait: Wait
    targets: frozenset[Target] = NOTHING


def room_of(admission: Admission, decision: Decision, set_aside: frozenset[Target]) -> Claim | NotYet:
    """What an admission means for a request whose turn it is. `set_aside`: targets whose next room is another's.

    Raises NoRoom when it is rejected.
    """
    if isinstance(admission, Reject):
        raise NoRoom(admission.code, admission.retry_s)
    decode, prefill = frozenset({decision.decode}), frozenset({decision.prefiller})
    if isinstance(admission, Wait):
        targets = {ErrorCode.DECODE_FULL: decode, ErrorCode.PREFILL_FULL: prefill}
        return NotYet(admission, targets.get(admission.code, decode | prefill))
    if taken := (decode | prefill) & set_aside:
        code = ErrorCode.DECODE_FULL if taken & decode else ErrorCode.PREFILL_FULL
        return NotYet(Wait(code, RETRY_S), taken)
    return admission.claim


@dataclass(eq=False, slots=True)
class _Waiter:
    """`turn` is set when it may try, or is told that its time is over; `tried` when it has, or has left."""

    priority: int
    tenant: str
    since_s: float
    patience_s: float
    not_yet: NotYet
    set_aside: frozenset[Target] = NOTHING
    over: bool = False
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    tried: asyncio.Event = field(default_factory=asyncio.Event)


class _Line:
    """Those who wait, in the order of their turns: by priority, then one of each tenant, then first come."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[str, dict[_Waiter, None]]] = {}
        self._all: dict[_Waiter, None] = {}  # in the order of their coming

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, waiter: _Waiter) -> bool:
        return waiter in self._all

    def join(self, waiter: _Waiter) -> None:
        self._all[waiter] = None
        self._groups.setdefault(waiter.priority, {}).setdefault(waiter.tenant, {})[waiter] = None

    def leave(self, waiter: _Waiter) -> None:
        if waiter not in self._all:
            return
        del self._all[waiter]
        tenants = self._groups[waiter.priority]
        del tenants[waiter.tenant][waiter]
        if not tenants[waiter.tenant]:
            del tenants[waiter.tenant]
        if not tenants:
            del self._groups[waiter.priority]

    def served(self, waiter: _Waiter) -> None:
        """It leaves with what it came for, so the other tenants are before its own now."""
        tenants = self._groups[waiter.priority]
        tenants[waiter.tenant] = tenants.pop(waiter.tenant)
        self.leave(waiter)

    def oldest(self) -> _Waiter:
        return next(iter(self._all))

    def since(self, since_s: float) -> list[_Waiter]:
        """Those who have waited from then on or longer."""
        return list(takewhile(lambda waiter: waiter.since_s <= since_s, self._all))

    def front(self) -> list[_Waiter]:
        return list(islice(self._in_order(), FRONT))

    def others(self, turn: int) -> list[_Waiter]:
        """Some of those behind the front, others in every turn."""
        behind = list(islice(self._in_order(), FRONT, None))
        start = turn * OTHERS % len(behind) if len(behind) > OTHERS else 0
        return (behind[start:] + behind[:start])[:OTHERS]

    def _in_order(self) -> Iterator[_Waiter]:
        for priority in sorted(self._groups):
            for row in zip_longest(*self._groups[priority].values()):
                yield from (waiter for waiter in row if waiter is not None)


class FairQueue:
    """At most `bound` requests wait, none longer than `max_wait_s`. For one event loop.

    By priority (lower goes first, as in vLLM), within one priority one request of each tenant in turn, within a tenant
    first come, first served. Nobody is overtaken by those behind it unless they fit where it does not; and once its
    patience is over, the next room of the targets it waits for is kept for it.
    """

    def __init__(self, *, bound: int, max_wait_s: float, clock: Clock) -> None:
        self._bound, self._max_wait_s, self._clock = bound, max_wait_s, clock
        self._line = _Line()
        self._changed = asyncio.Event()
        self._rounds: asyncio.Task[None] | None = None
        self._trying_s = 0.0  # spent in the tries of this round
        self._turn = 0

    @property
    def waiting(self) -> int:
        return len(self._line)

    def poke(self) -> None:
        """Something was released or has changed. Costs nothing while nobody waits."""
        if len(self._line):
            self._changed.set()

    async def admitted(
        self,
        attempt: Callable[[frozenset[Target]], T | NotYet],
        *,
        priority: int = 0,
        tenant: str = "",
        patience_s: float | None = None,
    ) -> T:
        """What `attempt` returns once it returns something else than NotYet.

        It is called in the caller's own task, with the targets that are kept for others, and holds what it reserves:
        nothing is lost when the caller is cancelled. What it raises is passed on. `patience_s`: half of `max_wait_s`
        unless given. Raises QueueFull, and NoRoom when the longest wait is over.
        """
        if len(self._line):
            not_yet = NotYet(self._line.oldest().not_yet.wait)
        else:
            outcome = attempt(NOTHING)
            if not isinstance(outcome, NotYet):
                return outcome
            not_yet = outcome
        waiter = self._joined(priority, tenant, self._max_wait_s / 2 if patience_s is None else patience_s, not_yet)
        try:
            return await self._in_turn(waiter, attempt)
        finally:
            self._line.leave(waiter)
            waiter.tried.set()
            self._changed.set()  # what it was kept from, or what was kept for it, may be another's

    async def _in_turn(self, waiter: _Waiter, attempt: Callable[[frozenset[Target]], T | NotYet]) -> T:
        while True:
            await waiter.turn.wait()
            waiter.turn.clear()
            if waiter.over:
                wait = waiter.not_yet.wait
                raise NoRoom(wait.code, wait.ready_s, waited=True)
            began_s = self._clock.now_s()
            outcome = attempt(waiter.set_aside)
            self._trying_s += self._clock.now_s() - began_s
            if not isinstance(outcome, NotYet):
                self._line.served(waiter)
                return outcome
            waiter.not_yet = outcome
            waiter.tried.set()

    def _joined(self, priority: int, tenant: str, patience_s: float, not_yet: NotYet) -> _Waiter:
        now_s = self._clock.now_s()
        if len(self._line) >= self._bound:
            # Who came when the oldest did was served in about this time, and so will be those who wait now.
            retry_s = whole_seconds(now_s - self._line.oldest().since_s)
            raise QueueFull(f"{self._bound} requests already wait: try again in {retry_s} s", retry_after_s=retry_s)
        waiter = _Waiter(priority, tenant, now_s, patience_s, not_yet)
        if len(self._line):
            self._changed.set()  # the first one has just tried
        self._line.join(waiter)
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.get_running_loop().create_task(self._give_turns())
        return waiter

    # --- turns ---

    async def _give_turns(self) -> None:
        """Rounds, as long as somebody waits: after every change, and now and then without one."""
        while len(self._line):
            await self._change()
            self._changed.clear()  # before the round: what changes while it runs asks for another
            self._end_waits()
            self._trying_s = 0.0
            await self._round()
            if self._trying_s > 0:
                await self._clock.sleep(min(RETRY_S, REST * self._trying_s))

    async def _round(self) -> None:
        """The front of the line tries, one after the other, and some others when that was in vain. Whoever leaves the
        line asks for another round."""
        waiting = len(self._line)
        set_aside = await self._try(self._line.front(), NOTHING)
        if len(self._line) == waiting > FRONT:
            self._turn += 1
            await self._try(self._line.others(self._turn), set_aside)

    async def _try(self, waiters: list[_Waiter], set_aside: frozenset[Target]) -> frozenset[Target]:
        """`set_aside`, with the targets that are to be kept for one of these as well."""
        for waiter in waiters:
            if waiter not in self._line:
                continue
            waiter.set_aside = set_aside
            waiter.tried.clear()
            waiter.turn.set()
            await waiter.tried.wait()
            if waiter in self._line and self._clock.now_s() - waiter.since_s >= waiter.patience_s:
                set_aside |= waiter.not_yet.targets
        return set_aside

    async def _change(self) -> None:
        if self._changed.is_set():
            return
        pause = asyncio.ensure_future(self._clock.sleep(self._pause_s()))
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({pause, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
            changed.cancel()

    def _pause_s(self) -> float:
        ready_s = min(waiter.not_yet.wait.ready_s for waiter in self._line.front())
        left_s = self._line.oldest().since_s + self._max_wait_s - self._clock.now_s()
        return max(SOONEST_RETRY_S, min(RETRY_S, ready_s, left_s))

    def _end_waits(self) -> None:
        for waiter in self._line.since(self._clock.now_s() - self._max_wait_s):
            self._line.leave(waiter)
            waiter.over = True
            waiter.turn.set()

"""The fair queue: order, bounds and limits of waiting, with a clock that moves when the test says so."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from disagg_router.errors import BadRequest, ErrorCode, NoRoom, QueueFull
from disagg_router.interfaces import Claim, Reject, Reserved, Wait
from disagg_router.model import Decision, Path, Reason
from disagg_router.routing.queue import FRONT, OTHERS, FairQueue, NotYet, room_of
from tests.builders import target
from tests.fakes.clock import FakeClock
from tests.fakes.clock import settle as settle_some

D0, D1, P0 = target("d0"), target("d1"), target("p0")


async def settle():
    """A round of turns is many steps of the loop."""
    for _ in range(3):
        await settle_some()


class Places:
    """Free places per target. A waiter takes as many as it wants, from the first of `on` that has them."""

    def __init__(self, **free: int) -> None:
        self.free = {target(name): count for name, count in free.items()}
        self.tries: Counter[str] = Counter()
        self.served: list[str] = []

    def attempt(self, name: str, *on: str, want: int = 1):
        def attempt(set_aside):
            self.tries[name] += 1
            for wanted in (target(t) for t in on or ("d0",)):
                if self.free[wanted] >= want and wanted not in set_aside:
                    self.free[wanted] -= want
                    self.served.append(name)
                    return wanted
            return NotYet(Wait(ErrorCode.DECODE_FULL, 9.0), frozenset({target((on or ("d0",))[-1])}))

        return attempt

    def give(self, name: str, count: int = 1) -> None:
        self.free[target(name)] += count


class World:
    def __init__(self, *, bound: int = 100, max_wait_s: float = 30.0, **free: int) -> None:
        self.clock = FakeClock()
        self.places = Places(**(free or {"d0": 0}))
        self.queue = FairQueue(bound=bound, max_wait_s=max_wait_s, clock=self.clock)
        self.tasks: dict[str, asyncio.Task[object]] = {}

    async def come(self, name: str, *on: str, want: int = 1, **how) -> None:
        self.tasks[name] = asyncio.create_task(
            self.queue.admitted(self.places.attempt(name, *on, want=want), **how), name=name
        )
        await settle()

    async def give(self, name: str = "d0", count: int = 1) -> None:
        self.places.give(name, count)
        self.queue.poke()
        await settle()

    async def later(self, seconds: float) -> None:
        """In small steps: a round is more of the loop's steps than the clock gives between two sleepers."""
        until_s = self.clock.now_s() + seconds
        while (left_s := until_s - self.clock.now_s()) > 0:
            await self.clock.advance(min(left_s, 0.5))
            await settle()

    async def leave(self, *names: str) -> None:
        for name in names or self.tasks:
            self.tasks[name].cancel()
        await asyncio.gather(*(self.tasks[name] for name in names or self.tasks), return_exceptions=True)
        await settle()


@pytest.mark.parametrize(
    ("arrivals", "served"),
    [
        ("a0 b0 c0", "a0 b0 c0"),
        ("a9 b0 c-1", "c-1 b0 a9"),
        ("a1 b0 c1 d0", "b0 d0 a1 c1"),
        ("x:a x:b x:c y:d y:e", "x:a y:d x:b y:e x:c"),
        ("x:a x:b y:c x:d z:e", "x:a y:c z:e x:b x:d"),
        ("x:a1 x:b0 y:c1 y:d0", "x:b0 y:d0 x:a1 y:c1"),
    ],
)
async def test_who_is_next(arrivals, served):
    """Lower priority numbers first, then one of each tenant in turn, then first come: one place frees at a time."""
    world = World()
    for name in arrivals.split():
        tenant, _, rest = name.rpartition(":")
        await world.come(name, tenant=tenant, priority=int(rest[1:] or 0))
    for _ in arrivals.split():
        await world.give()
    assert world.places.served == served.split()
    assert world.queue.waiting == 0


async def test_with_room_and_nobody_before_it_a_request_does_not_wait():
    """Not even for another task to run."""
    world = World(d0=1)
    assert await world.queue.admitted(world.places.attempt("a")) == D0
    assert world.places.tries == {"a": 1}


async def test_several_places_at_once_serve_several():
    """One poke is enough for all that fit."""
    world = World()
    for n in range(20):
        await world.come(f"r{n}")
    await world.give(count=15)
    assert world.places.served == [f"r{n}" for n in range(15)]
    await world.leave()


async def test_who_fits_elsewhere_is_overtaken_but_not_blocked():
    """A newcomer tries after those before it, and takes the room that they have no use for."""
    world = World(d0=0, d1=1)
    await world.come("full", "d0")
    await world.come("free", "d1")
    assert world.places.served == ["free"]
    await world.come("too", "d1", "d0")
    await world.give("d0")
    assert world.places.served == ["free", "full"]
    await world.leave()


async def test_a_newcomer_does_not_overtake_one_who_has_not_been_poked_yet():
    """Room that has just come back belongs to who waits."""
    world = World()
    await world.come("first")
    world.places.give("d0")
    await world.come("second")
    assert world.places.served == ["first"]
    await world.leave()


async def test_only_the_front_tries():
    """A poke costs no more with a long line than with a short one; behind the front others try in every round."""
    world = World()
    for n in range(30):
        await world.come(f"r{n}")
    seen = set()
    for _ in range(8):
        world.places.tries.clear()
        await world.give(count=0)
        assert sum(world.places.tries.values()) == FRONT + OTHERS
        assert {f"r{n}" for n in range(FRONT)} <= world.places.tries.keys()
        seen |= world.places.tries.keys()
    assert seen == set(world.tasks)
    await world.leave()


async def test_a_front_of_large_ones_does_not_keep_a_small_one_waiting():
    """Twelve want five places each and two are free: the one behind them that wants one is served."""
    world = World(d0=2)
    for n in range(12):
        await world.come(f"large{n}", want=5)
    await world.come("small", want=1)
    await world.later(3.0)
    assert world.places.served == ["small"]
    await world.leave()


async def test_pokes_are_gathered():
    """Many in one go are one round; with nobody there they are nothing."""
    world = World()
    world.queue.poke()
    await world.come("a")
    world.places.tries.clear()
    for _ in range(50):
        world.queue.poke()
    await settle()
    assert world.places.tries == {"a": 1}
    await world.leave()


async def test_tries_take_a_fifth_of_the_time_at_most():
    """What a round's tries have cost is rested for four times over, whatever pokes meanwhile."""
    world = World()
    tries = []

    def slow(_):
        tries.append(world.clock.now_s())
        world.clock._now_s += 0.01
        return NotYet(Wait(ErrorCode.DECODE_FULL, 9.0))

    waiting = asyncio.create_task(world.queue.admitted(slow))
    await settle()
    began_s = world.clock.now_s()
    for _ in range(1000):
        world.queue.poke()
        await world.clock.advance(0.001)
    took_s = world.clock.now_s() - began_s
    assert 0.15 * took_s < 0.01 * (len(tries) - 1) <= 0.21 * took_s
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_it_tries_again_without_a_poke():
    """What frees because time passes, a predicted queue for one, pokes nobody."""
    world = World()
    await world.come("a")
    world.places.give("d0")
    await world.later(0.3)
    assert world.places.served == ["a"]


# --- limits ---------------------------------------------------------------------------------------------------------


async def test_the_line_has_a_bound():
    """One more is told to come back after about the time that the oldest has waited."""
    world = World(bound=2, max_wait_s=60)
    await world.come("a")
    await world.come("b")
    await world.later(6.5)
    await world.come("c")
    error = world.tasks["c"].exception()
    assert isinstance(error, QueueFull)
    assert (error.status, error.code, error.retry_after_s) == (429, ErrorCode.QUEUE_FULL, 7)
    assert world.queue.waiting == 2
    await world.leave()


async def test_after_the_longest_wait_it_is_told_what_is_full():
    """503, the code of the last wait, and its prediction as Retry-After; also for one that never was in front."""
    world = World(max_wait_s=5)
    for n in range(FRONT + 2):
        await world.come(f"r{n}")
    await world.later(4.9)
    assert world.queue.waiting == FRONT + 2
    await world.later(0.2)
    for task in world.tasks.values():
        error = task.exception()
        assert isinstance(error, NoRoom)
        assert (error.status, error.code, error.retry_after_s) == (503, ErrorCode.DECODE_FULL, 9)
        assert "still after the longest wait: try again in 9 s" in str(error)
    assert world.queue.waiting == 0


async def test_what_an_attempt_raises_is_passed_on():
    """At once or after a wait, and the next one is not left behind."""
    world = World()
    answers = iter([NotYet(Wait(ErrorCode.LINK_FULL, 1.0)), BadRequest("no")])

    def attempt(_):
        answer = next(answers)
        if isinstance(answer, NotYet):
            return answer
        raise answer

    waiting = asyncio.create_task(world.queue.admitted(attempt))
    await settle()
    await world.come("b")
    await world.give()
    with pytest.raises(BadRequest):
        await waiting
    assert world.places.served == ["b"]


@pytest.mark.parametrize("poked_first", [True, False])
async def test_a_cancelled_one_passes_its_turn_on(poked_first):
    """Nothing is reserved for it, whether it had been called already or not."""
    world = World()
    await world.come("a")
    await world.come("b")
    world.places.give("d0")
    if poked_first:
        world.queue.poke()
        await asyncio.sleep(0)
    world.tasks["a"].cancel()
    world.queue.poke()
    await settle()
    assert world.places.served == ["b"]
    assert world.tasks["a"].cancelled()
    assert world.queue.waiting == 0


async def test_cancelled_at_any_moment_it_keeps_nothing():
    """A place that is taken is always in somebody's hands: a cancel after 0, 1, 2, ... steps of the loop."""
    for steps in range(12):
        world = World()
        await world.come("a")
        world.places.give("d0")
        world.queue.poke()
        for _ in range(steps):
            await asyncio.sleep(0)
        world.tasks["a"].cancel()
        await settle()
        assert world.places.free[D0] == (1 if world.tasks["a"].cancelled() else 0), steps
        assert world.queue.waiting == 0


async def test_one_that_goes_while_another_has_its_turn_stops_nobody():
    """A cancel after 0, 1, 2, ... steps of a round in which it would have been the second."""
    for steps in range(12):
        world = World()
        for name in "abc":
            await world.come(name)
        world.queue.poke()
        for _ in range(steps):
            await asyncio.sleep(0)
        world.tasks["b"].cancel()
        await settle()
        await world.give(count=2)
        assert world.places.served == ["a", "c"], steps


# --- patience -------------------------------------------------------------------------------------------------------


async def test_small_ones_pass_a_big_one_until_its_patience_is_over():
    """Then what frees is kept until it fits; who can be served elsewhere still is."""
    world = World(d0=0, d1=0)
    await world.come("big", "d0", want=3, patience_s=10)
    await world.give("d0")
    await world.come("small", "d0")
    assert world.places.served == ["small"]
    await world.later(10)
    await world.come("later", "d0")
    for _ in range(3):
        await world.give("d0")
        await world.give("d1", 0)
    assert world.places.served == ["small", "big"]
    await world.come("elsewhere", "d1")
    await world.give("d0")
    await world.give("d1")
    assert world.places.served == ["small", "big", "later", "elsewhere"]


async def test_patience_is_half_the_longest_wait_unless_said_otherwise():
    """After 15 of 30 s."""
    world = World(max_wait_s=30)
    await world.come("big", "d0", want=2)
    await world.later(14.9)
    await world.give()
    await world.come("early", "d0")
    await world.later(0.2)
    await world.give()
    await world.come("late", "d0")
    assert world.places.served == ["early"]
    await world.give()
    assert world.places.served == ["early", "big"]
    await world.leave()


async def test_room_is_not_kept_from_a_better_priority():
    """Those in front of the impatient one take what they need; and one that leaves lets go of what was kept."""
    world = World()
    await world.come("big", "d0", want=2, patience_s=1, priority=5)
    await world.later(2)
    await world.give()
    await world.come("urgent", "d0", priority=0)
    assert world.places.served == ["urgent"]
    await world.come("same", "d0", priority=5)
    await world.give()
    assert world.places.served == ["urgent"]
    await world.leave("big")
    assert world.places.served == ["urgent", "same"]


# --- what admission says, as a turn ---------------------------------------------------------------------------------

CLAIM = Claim(1.0)
REMOTE = Decision(Path.REMOTE_PREFILL, D0, Reason.POLICY, P0)
LOCAL = Decision(Path.LOCAL, D0, Reason.POLICY)


@pytest.mark.parametrize(
    ("decision", "admission", "set_aside", "expected"),
    [
        (REMOTE, Reserved(CLAIM), (), CLAIM),
        (REMOTE, Reserved(CLAIM), (D1,), CLAIM),
        (REMOTE, Reserved(CLAIM), (D0,), (ErrorCode.DECODE_FULL, {D0})),
        (REMOTE, Reserved(CLAIM), (P0,), (ErrorCode.PREFILL_FULL, {P0})),
        (LOCAL, Reserved(CLAIM), (D0,), (ErrorCode.DECODE_FULL, {D0})),
        (REMOTE, Wait(ErrorCode.DECODE_FULL, 1), (), (ErrorCode.DECODE_FULL, {D0})),
        (REMOTE, Wait(ErrorCode.PREFILL_FULL, 1), (), (ErrorCode.PREFILL_FULL, {P0})),
        (REMOTE, Wait(ErrorCode.LINK_FULL, 1), (), (ErrorCode.LINK_FULL, {D0, P0})),
        (LOCAL, Wait(ErrorCode.DECODE_FULL, 1), (), (ErrorCode.DECODE_FULL, {D0})),
    ],
)
def test_what_a_turn_comes_to(decision, admission, set_aside, expected):
    """A claim, or what has to empty first: the targets are those that are kept for it when its patience is over."""
    found = room_of(admission, decision, frozenset(set_aside))
    assert (found if isinstance(found, Claim) else (found.wait.code, set(found.targets))) == expected


@pytest.mark.parametrize(("retry_s", "header"), [(0.01, 1), (4.2, 5), (1e9, 3600)])
def test_a_rejection_is_429_with_whole_seconds(retry_s, header):
    """One sentence that says what is full and when to try again."""
    with pytest.raises(
        NoRoom, match=f"the link .* is not predicted to be free in time: try again in {header} s"
    ) as info:
        room_of(Reject(ErrorCode.LINK_FULL, retry_s), REMOTE, frozenset())
    assert (info.value.status, info.value.code, info.value.retry_after_s) == (429, ErrorCode.LINK_FULL, header)


# --- all at once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_everyone_gets_an_answer(seed):
    """Random arrivals, releases, cancels and pauses on one resource: never more than the bound wait, nothing is lost,
    and within a tenant and priority nobody is served before one that came earlier."""
    rng = random.Random(seed)
    world = World(bound=6, max_wait_s=20, d0=3)
    born: dict[str, tuple[str, int, int]] = {}
    given, most = 3, 0
    for n in range(250):
        what = rng.random()
        if what < 0.45:
            name, tenant, priority = f"r{n}", rng.choice("xyz"), rng.choice([0, 0, 1])
            born[name] = tenant, priority, n
            await world.come(name, tenant=tenant, priority=priority, patience_s=rng.choice([None, 1.0]))
        elif what < 0.7:
            given += 1
            await world.give()
        elif what < 0.8 and (open_ := [t for t in world.tasks.values() if not t.done()]):
            rng.choice(open_).cancel()
            await asyncio.sleep(0)
        else:
            await world.later(rng.choice([0.1, 3.0]))
        most = max(most, world.queue.waiting)
    await world.later(25)

    assert world.queue.waiting == 0
    assert most <= 6
    ends = Counter(end_of(task) for task in world.tasks.values())
    assert set(ends) <= {"served", "cancelled", "QueueFull", "NoRoom"}
    assert ends["served"] == len(world.places.served) == given - world.places.free[D0]
    for tenant, priority in {(t, p) for t, p, _ in born.values()}:
        order = [born[name][2] for name in world.places.served if born[name][:2] == (tenant, priority)]
        assert order == sorted(order)


def end_of(task: asyncio.Task[object]) -> str:
    assert task.done()
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    return type(error).__name__ if error else "served"

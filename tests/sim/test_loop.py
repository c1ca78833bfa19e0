"""Virtual time: it passes only as timers ask for it, and nothing waits."""

from __future__ import annotations

import asyncio
import time

import pytest

from disagg_router.sim.loop import NothingToDo, VirtualClock, VirtualLoop, run


def test_timers_come_in_order_and_at_their_times():
    """Whoever made them, and however far apart."""
    loop, seen = VirtualLoop(), []

    async def sleeper(name, seconds):
        await asyncio.sleep(seconds)
        seen.append((name, loop.time()))

    async def main():
        loop.call_at(0.25, lambda: seen.append(("timer", loop.time())))
        await asyncio.gather(sleeper("late", 3600.0), sleeper("soon", 0.1), sleeper("last", 1e6))

    run(main(), loop)
    assert [name for name, _ in seen] == ["soon", "timer", "late", "last"]
    assert [at_s for _, at_s in seen] == pytest.approx([0.1, 0.25, 3600.0, 1e6])


def test_a_day_takes_no_time():
    """86,400 ticks of a second on the clock that the router uses."""
    loop = VirtualLoop()

    async def main():
        clock = VirtualClock(loop)
        for _ in range(1000):
            await clock.sleep(86.4)
        return clock.now_s()

    began_s = time.monotonic()
    assert run(main(), loop) == pytest.approx(86_400)
    assert time.monotonic() - began_s < 60


def test_a_limit_ends_a_wait():
    """asyncio's own limits are virtual too."""
    loop = VirtualLoop()

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        return loop.time()

    assert run(main(), loop) == pytest.approx(5.0)


def test_what_would_hang_for_ever_is_an_error():
    """Nobody is left who could set the event."""

    async def main():
        await asyncio.Event().wait()

    with pytest.raises(NothingToDo, match="waits for another"):
        run(main(), VirtualLoop())


def test_an_error_in_a_timer_ends_the_run():
    """Nobody awaits a timer: its error would be logged, and the others would wait on."""
    loop = VirtualLoop()

    def fail():
        raise ZeroDivisionError("no such step")

    async def main():
        loop.call_later(1.0, fail)
        await asyncio.sleep(1000.0)

    with pytest.raises(ZeroDivisionError, match="no such step"):
        run(main(), loop)
    assert loop.time() == pytest.approx(1.0)

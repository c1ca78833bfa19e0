"""Handoffs between simulated engines, and clients that go at any moment, by hand arithmetic: 1 MB/s, 1 kB per token."""

from __future__ import annotations

import asyncio
import math
from contextlib import nullcontext

import pytest

from disagg_router.sim.instance import Pull, SimInstance
from disagg_router.sim.jobs import Job
from disagg_router.sim.loop import NothingToDo, VirtualLoop
from tests.sim.engines import Bench, Times, holds_nothing, job, near, times, virtually


async def prefilled(engine: SimInstance, number: int, prompt: int) -> Job:
    one = job(number, prompt, pinned=True)
    engine.submit(one)
    await one.done
    return one


def pulled(number: int, prompt: int, output: int, of: int) -> Job:
    """What the prefill leg `of` computed."""
    full = range(of * 10_000, of * 10_000 + prompt // 10)
    return job(number, prompt, output, blocks=full)


def test_a_handoff_by_hand():
    """500 tokens: 60 ms of prefill; 0.2 s of handoff, 0.5 s for 0.5 MB, a step for the last token, three for the rest.
    The prefill's blocks are kept until all has arrived, and the decode's from the beginning."""

    async def scenario(bench: Bench) -> Times:
        source, sink = bench.engine("p0"), bench.engine("d0", handoff_s=0.2)
        await prefilled(source, 7, 500)
        assert bench.loop.time() == pytest.approx(0.06)
        one = pulled(8, 500, 4, of=7)
        sink.submit(one, Pull(source, 7))
        await asyncio.sleep(0.699)
        assert (source.scheduler.cache.used_blocks, sink.scheduler.cache.used_blocks) == (50, 50)
        assert (sink.load().waiting, sink.load().running) == (1, 0)
        await one.done
        assert holds_nothing(source)
        assert holds_nothing(sink)
        assert (sink.load().pulled_bytes, sink.load().pull_s) == (pytest.approx(500_000), pytest.approx(0.7))
        assert sink.scheduler.cache.cached_blocks(one.keys) == 50
        return times(one)

    first_s = 0.06 + 0.7 + 0.0101
    assert [virtually(scenario)] == near((first_s, first_s + 0.033, 0.011))


def test_what_the_sink_has_is_not_moved():
    """300 of 500 tokens are cached there."""

    async def scenario(bench: Bench) -> tuple[float, int]:
        source, sink = bench.engine("p0"), bench.engine("d0")
        known = pulled(1, 300, 1, of=7)
        sink.submit(known)
        await known.done
        await prefilled(source, 7, 500)
        one, begun_s = pulled(8, 500, 1, of=7), bench.loop.time()
        sink.submit(one, Pull(source, 7))
        await one.done
        return one.first_s - begun_s, one.cached_tokens

    assert virtually(scenario) == (pytest.approx(0.2 + 0.0101), 300)


def test_pulls_share_their_links():
    """Two of 500 tokens each out of one instance into two others: 1 s instead of 0.5."""

    async def scenario(bench: Bench) -> list[float]:
        source, sinks = bench.engine("p0"), [bench.engine("d0"), bench.engine("d1")]
        for number in (1, 2):
            await prefilled(source, number, 500)
        begun_s, jobs = bench.loop.time(), [pulled(3, 500, 1, of=1), pulled(4, 500, 1, of=2)]
        for number, (sink, one) in enumerate(zip(sinks, jobs, strict=True), start=1):
            sink.submit(one, Pull(source, number))
        await asyncio.gather(*(one.done for one in jobs))
        return [one.first_s - begun_s for one in jobs]

    assert virtually(scenario) == [pytest.approx(1.0101)] * 2


def test_an_ideal_link_leaves_the_handoff():
    """0.2 s, and the step."""

    async def scenario(bench: Bench) -> float:
        source, sink = bench.engine("p0"), bench.engine("d0", handoff_s=0.2)
        await prefilled(source, 1, 500)
        begun_s, one = bench.loop.time(), pulled(2, 500, 1, of=1)
        sink.submit(one, Pull(source, 1))
        await one.done
        return one.first_s - begun_s

    assert virtually(scenario, math.inf) == pytest.approx(0.2101)


def test_streams_go_on_while_others_are_pulled():
    """The pull takes 0.51 s; the stream sees a longer step at its end only: 10.1 ms and its own 1 ms."""

    async def scenario(bench: Bench) -> tuple[Times, Times]:
        source, sink = bench.engine("p0"), bench.engine("d0")
        await prefilled(source, 1, 500)
        stream, one = job(2, 90, 100), pulled(3, 500, 2, of=1)
        sink.submit(stream)
        sink.submit(one, Pull(source, 1))
        await asyncio.gather(stream.done, one.done)
        return times(stream), times(one)

    stream, one = virtually(scenario)
    # Begun at 60 ms; the stream's steps end at 79 + 11 k ms, the first not before 560 ms is 563, k = 44.
    assert one == pytest.approx((0.563 + 0.0111, 0.563 + 0.0111 + 0.012, 0.012))
    assert stream.max_gap_s == pytest.approx(0.012)
    assert stream.last_s == pytest.approx(0.079 + 0.011 * 97 + 0.0111 + 0.012)


@pytest.mark.parametrize(("after_s", "kept"), [(4.9, True), (5.1, False)])
def test_a_handoff_is_kept_for_its_lease(after_s: float, kept: bool):
    """5 s; who comes later is told, where a real engine would answer with other KV."""

    async def scenario(bench: Bench) -> bool:
        source, sink = bench.engine("p0", lease_s=5.0), bench.engine("d0")
        await prefilled(source, 1, 500)
        assert source.scheduler.cache.used_blocks == 50
        await asyncio.sleep(after_s)
        one = pulled(2, 500, 1, of=1)
        with nullcontext() if kept else pytest.raises(RuntimeError, match="p0 holds no handoff 1 any more"):
            sink.submit(one, Pull(source, 1))
            await one.done
        assert holds_nothing(source)
        assert holds_nothing(sink)
        return one.done.done()

    assert virtually(scenario) is kept


def test_who_waits_for_a_kept_handoffs_room_gets_it_when_it_is_let_go():
    """A second prompt finds no room beside the first, until that is released; which a second time does nothing."""

    async def scenario(bench: Bench) -> float:
        engine = bench.engine(kv_tokens=600)
        await prefilled(engine, 1, 500)
        one = job(2, 500)
        engine.submit(one)
        await asyncio.sleep(0.94)
        assert not one.first.done()
        engine.release(1)
        engine.release(1)
        await one.done
        return one.first_s

    assert virtually(scenario) == pytest.approx(1.06)


# --- who goes before the end ------------------------------------------------------------------------------------------

WHEN_S = {
    "its first chunk": 0.02,
    "between its chunks": 0.110_000_000_1,
    "its second chunk": 0.15,
    "its answer": 0.5,
    "in line": 0.001,
}


@pytest.mark.parametrize("after_s", WHEN_S.values(), ids=WHEN_S)
def test_who_goes_leaves_nothing(after_s: float):
    """1,500 tokens in chunks, and steps of its answer from 180 ms on; a bystander ends as if nothing had been."""

    async def scenario(bench: Bench) -> None:
        engine = bench.engine()
        one, other = job(1, 1500, 200), job(2, 100, 50)
        engine.submit(one)
        engine.submit(other)
        await asyncio.sleep(after_s)
        engine.abort(one)
        engine.abort(one)
        assert not any(one.number == 1 for one in engine.scheduler.running)
        await other.done
        assert times(other).max_gap_s < 0.13
        assert not one.done.done()
        assert holds_nothing(engine)
        assert engine.scheduler.cache.cached_blocks(other.keys) == 14
        await asyncio.Event().wait()

    with pytest.raises(NothingToDo):  # no timer is left either
        virtually(scenario)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.71, 0.8], ids=["in line", "handoff", "bytes", "step", "answer"])
def test_who_goes_while_it_pulls_leaves_nothing(after_s: float):
    """Neither here nor at the source, whose handoff nobody else would let go."""

    async def scenario(bench: Bench) -> None:
        source, sink = bench.engine("p0"), bench.engine("d0", handoff_s=0.2)
        await prefilled(source, 1, 500)
        one = pulled(2, 500, 100, of=1)
        sink.submit(one, Pull(source, 1))
        await asyncio.sleep(after_s)
        sink.abort(one)
        await asyncio.sleep(0.2)  # for the step that runs
        assert holds_nothing(source)
        assert holds_nothing(sink)
        loops.append(bench.loop)
        await asyncio.Event().wait()

    loops: list[VirtualLoop] = []
    with pytest.raises(NothingToDo):
        virtually(scenario)
    assert loops[0].time() < 2.0  # the lease's end is no longer waited for

"""A request and the room it needs: it waits, is refused, and is measured."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from disagg_router.errors import (
    ErrorCode,
    NoRoom,
    UpstreamError,
)
from disagg_router.interfaces import Claim, EngineLoad
from disagg_router.model import HandoffResult, Path, Slo
from disagg_router.observability.requests import RequestRecord
from tests.builders import COSTS, TIMING, pair, request, target
from tests.fakes.clock import settle
from tests.routing.router_world import BODY, PATIENT, ROOM, World

# --- room -----------------------------------------------------------------------------------------------------------


async def test_a_full_decode_target_is_waited_for_and_then_used():
    """1,000 tokens of room, 300 each: the fourth waits until one of the three has ended."""
    world = World("d0", policy="threshold", tokens=172)  # and 128 expected of each answer
    world.loads.reconcile(target("d0"), ROOM)
    held = [asyncio.create_task(world.hold()) for _ in range(4)]
    await settle()
    assert [kind for kind, _ in world.client.kinds()] == ["local"] * 3
    held[0].cancel()
    await asyncio.sleep(0.2)
    await world.clock.advance(0.3)
    await asyncio.sleep(0.1)
    assert len(world.client.kinds()) == 4
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert world.at_rest()


async def test_what_will_not_be_free_in_time_is_refused_at_once():
    """429 with the code of what is full and when to come back, and nothing was sent anywhere."""
    world = World("p0", "d0", policy="threshold", tokens=600, max_wait_s=0.001)
    world.loads.reconcile(target("d0"), ROOM)
    holding = asyncio.create_task(world.hold())
    await settle()
    asked = len(world.client.asked)
    with pytest.raises(NoRoom) as refused:
        await world.ask(stream=True)
    assert (refused.value.status, refused.value.code) == (429, ErrorCode.DECODE_FULL)
    assert (refused.value.retry_after_s or 0) >= 1
    assert len(world.client.asked) == asked
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    assert world.at_rest()


async def test_a_wait_that_was_in_vain_ends_with_503():
    """max_wait_s after it began; the record has the wait."""
    world = World("d0", policy="threshold", tokens=600, max_wait_s=30.0)
    world.loads.reconcile(target("d0"), ROOM)
    holding = asyncio.create_task(world.hold())
    await settle()
    record = RequestRecord("/v1/completions", "r1", 0.0)

    async def ask():
        async with world.router.route(request(slo=PATIENT), BODY, record=record):
            pass

    waiting = asyncio.create_task(ask())
    await settle()
    await world.clock.advance(31.0)
    with pytest.raises(NoRoom) as refused:
        await waiting
    assert (refused.value.status, refused.value.code) == (503, ErrorCode.DECODE_FULL)
    assert record.queue_wait_s == pytest.approx(30.0, abs=0.5)
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    assert world.at_rest()


# --- what is measured -----------------------------------------------------------------------------------------------


async def test_a_streamed_handoff_tells_what_it_took():
    """From the decode leg's sending to its first byte, less a step of 10 ms; and the prefill from its start."""
    world = World("p0", "d0", tokens=1000)
    world.client.script["p0"], world.client.script["d0"] = [0.01], [0.01]
    waiting = asyncio.create_task(world.ask(stream=True))
    for _ in range(10):
        await settle()
        await world.clock.advance(0.05)
        await asyncio.sleep(0.005)
    await waiting
    ((told, moved_bytes, seconds, _),) = world.costs.handoffs
    assert told == pair("p0", "d0")
    assert moved_bytes == 0  # always_remote does not count
    assert seconds >= 0.04


async def test_an_answer_that_went_out_whole_teaches_how_long_answers_are():
    """One that was lost, or that the client left, does not."""
    world = World("d0", policy="always_local")
    for complete in (False, True):
        async with world.router.route(request(stream=True, max_output_tokens=64), BODY) as routed:
            assert routed.stream is not None
            routed.stream.count(9, world.clock.now_s())
            routed.complete = complete
    assert world.outputs.told == [(64, 9)]


async def test_a_fleet_that_nobody_knows_yet_refuses_nobody():
    """A chat behind a prompt whose time is a guess: predicted far too late, and served all the same."""
    world = World("d0", policy="threshold", tokens=9000)
    world.costs.believed = dataclasses.replace(COSTS, target=dataclasses.replace(TIMING, prefill_sd=1.0))
    world.client.script["d0"] = [60.0]
    long = asyncio.create_task(world.hold())
    await settle()
    world.client.tokens = 20
    assert (await world.ask(stream=True, slo=Slo(0.1, 1.0, 10.0)))[0].ttft[Path.LOCAL].mean_s > 0.5
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)


# --- what failed, and what is kept for others -------------------------------------------------------------------------


async def test_who_finds_a_place_kept_for_another_goes_elsewhere():
    """A request for 9,500 tokens has lost its patience: the next room of d0, the emptier one, is its. A small one that
    would have gone there is served by d1, at once, and counted as one decision."""
    world = World("d0", "d1", policy="threshold", tokens=9500)
    for name, held in (("d0", 2), ("d1", 4)):
        world.loads.reconcile(target(name), EngineLoad(0, 0, 0.0, 10_000))
        for _ in range(held):
            world.loads.leases.decode(target(name), Claim(1_000_000.0), streamed=True)
    large = asyncio.create_task(world.ask(slo=Slo(0.8, 1.0, 10.0), stream=True))
    await settle()
    await world.clock.advance(2.0)
    assert not large.done()
    world.client.tokens = 100
    small = asyncio.create_task(world.ask(slo=PATIENT, stream=True))
    for _ in range(4):
        await settle()
        await world.clock.advance(0.3)
    decision, _ = await asyncio.wait_for(small, 1)
    assert decision.decode == target("d1")
    assert world.seen.decisions == [(Path.LOCAL, decision.reason)]
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)


async def test_what_has_failed_late_is_tried_again_and_not_refused():
    """The engine died after 3 s, and the objective was 2: it was let in once, and another target has room."""
    world = World("d0", "d1", policy="break_even")
    for name in ("d0", "d1"):
        world.loads.leases.decode(target(name), Claim(1000.0), streamed=True)
    answer, calls = world.client._answer, []

    async def late(one):
        calls.append(one)
        if len(calls) > 1:
            return await answer(one)
        one.call.on_sent()
        await world.clock.sleep(3.0)
        raise UpstreamError("the engine died")

    world.client._answer = late
    asking = asyncio.create_task(world.ask(slo=Slo(2.0, 0.1, 0.5)))
    await settle()
    await world.clock.advance(3.1)
    decision, _ = await asyncio.wait_for(asking, 1)
    assert decision.decode.instance != calls[0].engine


async def test_a_handoff_whose_decode_target_has_left_is_released():
    """It left while the prefill ran: its blocks are not kept until the lease ends."""
    world = World("p0", "d0", "d1")
    world.client.script["p0"] = [0.05]
    asking = asyncio.create_task(world.ask())
    await asyncio.sleep(0.01)
    kept = {id_: one for id_, one in world.fleet.instances.items() if id_ == "p0"}
    world.fleet = dataclasses.replace(world.fleet, instances=kept)
    with pytest.raises(UpstreamError):
        await asking
    assert world.seen.handoffs == [HandoffResult.ABANDONED]

"""A request and the room it needs: it waits, is refused, and is measured."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from disagg_router.errors import (
    ErrorCode,
    NoRoom,
)
from disagg_router.model import Path, Slo
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

"""One follower of KV events per incarnation; what is gone is forgotten."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import pytest

from disagg_router.model import InstanceState, Target
from disagg_router.routing.followers import RETRY_S, Followers
from tests.builders import instance, target
from tests.fakes.clock import FakeClock, settle

D0 = instance("d0", kv_events="tcp://d0:5557")


class World:
    def __init__(self):
        self.clock, self.started, self.running, self.forgotten = FakeClock(), [], [], []
        self.fail: Exception | None = None
        self.followers = Followers(self.follow, self.forgotten.append, self.clock)

    async def follow(self, instance):
        self.started.append(instance.incarnation)
        if self.fail:
            raise self.fail
        self.running.append(instance.incarnation)
        try:
            await asyncio.Event().wait()
        finally:
            self.running.remove(instance.incarnation)

    async def see(self, **changes):
        seen = dataclasses.replace(D0, **changes)
        self.followers.update({seen.id: seen}, self.group)
        await settle()

    @asynccontextmanager
    async def open(self):
        async with asyncio.TaskGroup() as self.group:
            yield
            self.followers.update({}, self.group)


async def test_an_instance_is_followed_once_it_is_ready():
    """And only once, however often it is seen. One that publishes nothing is not."""
    world = World()
    async with world.open():
        await world.see(state=InstanceState.STARTING)
        assert world.started == []
        for _ in range(3):
            await world.see()
        assert world.started == ["d0-first"]
        await world.see(kv_events=None)
        assert world.running == []


async def test_the_same_process_coming_back_is_still_followed():
    """It missed a probe; its events went on."""
    world = World()
    async with world.open():
        await world.see()
        await world.see(state=InstanceState.UNREACHABLE)
        await world.see()
        assert (world.started, world.forgotten) == (["d0-first"], [])


@pytest.mark.parametrize("between", [InstanceState.UNREACHABLE, InstanceState.FAILED])
async def test_another_process_is_followed_anew_and_the_old_ones_blocks_are_forgotten(between):
    """It starts with an empty cache."""
    world = World()
    async with world.open():
        await world.see()
        await world.see(state=between)
        await world.see(incarnation="d0-second")
        assert world.running == ["d0-second"]
        assert world.forgotten == [target("d0")]


async def test_every_rank_of_an_instance_is_forgotten():
    """Its follower feeds one target for each."""
    world = World()
    async with world.open():
        await world.see(dp_size=3)
        await world.see(incarnation="d0-second", dp_size=3)
        assert world.forgotten == [Target(D0.id, rank) for rank in range(3)]


async def test_an_instance_without_events_is_forgotten_too():
    """What was guessed of it goes with the process, and with its silence."""
    world = World()
    async with world.open():
        await world.see(kv_events=None)
        await world.see(kv_events=None)
        assert (world.started, world.forgotten) == ([], [])
        await world.see(kv_events=None, incarnation="d0-second")
        assert world.forgotten == [target("d0")]
        await world.see(incarnation="d0-second")
        assert (world.running, world.forgotten) == (["d0-second"], [target("d0")] * 2)


async def test_an_instance_that_leaves_is_forgotten():
    """With its follower."""
    world = World()
    async with world.open():
        await world.see()
        world.followers.update({}, world.group)
        await settle()
        assert (world.running, world.forgotten) == ([], [target("d0")])


async def test_events_that_cannot_be_followed_are_tried_again():
    """The instance is taken for empty meanwhile, and the router lives."""
    world = World()
    world.fail = ZeroDivisionError()
    async with world.open():
        await world.see()
        assert world.forgotten == [target("d0")]
        world.fail = None
        await world.clock.advance(RETRY_S)
        assert world.running == ["d0-first"]

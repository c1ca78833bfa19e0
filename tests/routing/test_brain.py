"""The published fleet follows the source: who joins, leaves, is suspected."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from disagg_router.config import HealthConfig
from disagg_router.model import FleetSnapshot, InstanceState, PairState
from disagg_router.routing.brain import Brain
from disagg_router.routing.followers import Followers
from tests.builders import instance, pair
from tests.fakes.background import background
from tests.fakes.client import FakeClient
from tests.fakes.clock import FakeClock, settle


class World:
    def __init__(self):
        self.snapshots: asyncio.Queue[FleetSnapshot] = asyncio.Queue()
        self.client, self.clock, self.tested = FakeClient(), FakeClock(), []
        self.following, self.forgotten = set(), []
        self.brain = Brain(
            self,
            self.client,
            self.test,
            Followers(self.follow, self.forgotten.append, self.clock),
            served_name="tiny",
            health=HealthConfig(),
            soft_roles=False,
            clock=self.clock,
        )

    async def watch(self):
        while True:
            yield await self.snapshots.get()

    async def test(self, prefill, decode):
        self.tested.append((prefill.id, decode.id))

    async def follow(self, instance):
        self.following.add(instance.id)
        try:
            await asyncio.Event().wait()
        finally:
            self.following.discard(instance.id)

    async def declare(self, version, *names):
        self.snapshots.put_nowait(FleetSnapshot(version, tuple(instance(name) for name in names)))
        await settle()

    @asynccontextmanager
    async def running(self):
        async with background(self.brain.run()):
            yield


async def test_instances_join_are_tested_and_leave():
    """What has left is gone with its pairs, and is not probed any more."""
    world = World()
    async with world.running():
        await world.declare(1, "p0", "d0")
        assert [one.state for one in world.brain.fleet.instances.values()] == [InstanceState.READY] * 2
        assert world.brain.fleet.pairs[pair("p0", "d0")].state is PairState.READY
        await world.declare(2, "p0", "d0", "d1")
        assert world.tested == [("p0", "d0"), ("p0", "d1")]
        await world.declare(3, "d1")
        assert [str(id_) for id_ in world.brain.fleet.instances] == ["d1"]
        assert world.brain.fleet.pairs == {}


async def test_a_published_fleet_does_not_change():
    """Whoever read it keeps a consistent picture."""
    world = World()
    async with world.running():
        await world.declare(1, "d0")
        before = world.brain.fleet
        await world.declare(2, "d0", "d1")
        assert len(before.instances) == 1
        assert len(world.brain.fleet.instances) == 2


async def test_a_suspect_is_looked_at_at_once():
    """And an unknown one is no error: it may just have left."""
    world = World()
    async with world.running():
        await world.declare(1, "d0")
        world.client.health["d0"] = False
        world.brain.suspect(instance("d0").id)
        world.brain.suspect(instance("d9").id)
        await settle()
        assert world.brain.fleet.instances[instance("d0").id].state is InstanceState.UNREACHABLE


async def test_only_the_served_model_is_shown():
    """A name that the router would refuse is not offered; without an engine the bare name is."""
    world = World()
    assert [card["id"] for card in world.brain.model_cards()] == ["tiny"]
    async with world.running():
        await world.declare(1, "d0", "d1")
        assert world.brain.model_cards() == [{"id": "tiny", "object": "model", "max_model_len": 8192}]

"""The books follow the engines: loads are looked at, what is gone is forgotten, the clocks are kept going."""

from __future__ import annotations

import dataclasses
from contextlib import asynccontextmanager

import pytest

from disagg_router.errors import UpstreamTimeout
from disagg_router.interfaces import EngineLoad
from disagg_router.model import InstanceState
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.gauging import Gauge
from disagg_router.routing.loads import Loads
from disagg_router.routing.queue import FairQueue
from disagg_router.routing.views import Views
from disagg_router.view import Leans
from tests.builders import COSTS, instance, target
from tests.fakes.background import background
from tests.fakes.client import FakeClient
from tests.fakes.clock import FakeClock, settle
from tests.fakes.costs import FixedCosts

BUSY = EngineLoad(running=3, waiting=2, kv_usage=0.5, kv_capacity_tokens=1000, pulled_bytes=1e6, pull_s=0.5)


class Balancer:
    """Leans as many times as it was asked."""

    def step(self, view, leans):
        return Leans(pack=leans.pack + 1)


class World:
    def __init__(self, *instances):
        self.clock, self.client, self.costs = FakeClock(), FakeClient(), FixedCosts(COSTS)
        self.fleet = Fleet({i.id: i for i in instances})
        self.loads = Loads(costs=self.costs, now_s=self.clock.now_s)
        self.views = Views(lambda: self.fleet, self.loads, self.costs)
        self.gauge = Gauge(
            fleet=lambda: self.fleet,
            client=self.client,
            loads=self.loads,
            costs=self.costs,
            views=self.views,
            balancer=Balancer(),
            queue=FairQueue(bound=4, max_wait_s=30.0, clock=self.clock),
            interval_s=1.0,
            clock=self.clock,
        )

    @asynccontextmanager
    async def running(self):
        async with background(self.gauge.run()):
            await settle()
            yield


async def test_what_an_engine_shows_beyond_our_leases_is_somebody_elses():
    """Five requests and half of 1,000 tokens at 1,000 bytes, in the second look as in the first."""
    world = World(instance("d0"))
    world.client.loads["d0"] = BUSY
    async with world.running():
        await world.clock.advance(1.0)
        load = world.loads.of(target("d0"))
    assert (load.foreign, load.kv_capacity_bytes, load.kv_free_bytes) == (5, 1e6, 5e5)


async def test_pulls_between_two_looks_are_told_to_the_cost_model():
    """Their difference: totals since an engine's start say nothing of the link now."""
    world = World(instance("d0"))
    world.client.loads["d0"] = BUSY
    async with world.running():
        world.client.loads["d0"] = dataclasses.replace(BUSY, pulled_bytes=4e6, pull_s=0.7)
        await world.clock.advance(1.0)
        await world.clock.advance(1.0)
    assert [(id_, moved, round(s, 3)) for id_, moved, s, _ in world.costs.transfers] == [("d0", 3e6, 0.2)]


@pytest.mark.parametrize("change", ["gone", "restarted", "unreachable"])
async def test_what_is_another_process_or_gone_is_forgotten(change):
    """Its capacity, what others did there, and what its speed was."""
    world = World(instance("d0"))
    world.client.loads["d0"] = BUSY
    async with world.running():
        now = {
            "gone": [],
            "restarted": [instance("d0", incarnation="second")],
            "unreachable": [instance("d0", state=InstanceState.UNREACHABLE)],
        }[change]
        world.client.loads["d0"] = UpstreamTimeout("slow")
        world.fleet = Fleet({i.id: i for i in now})
        await world.clock.advance(1.0)
    assert world.costs.forgotten == [target("d0")]
    assert world.loads.of(target("d0")).foreign == 0


async def test_an_engine_that_does_not_tell_keeps_what_was_known():
    """The health probes say whether it is there."""
    world = World(instance("d0"))
    world.client.loads["d0"] = BUSY
    async with world.running():
        await world.clock.advance(1.0)
        world.client.loads["d0"] = UpstreamTimeout("slow")
        await world.clock.advance(5.0)
    assert world.loads.of(target("d0")).foreign == 5


async def test_a_servers_ranks_share_what_it_shows():
    """Half of everything each."""
    world = World(instance("d0", dp_size=2))
    world.client.loads["d0"] = dataclasses.replace(BUSY, running=4, waiting=0)
    async with world.running():
        await world.clock.advance(1.0)
        loads = [world.loads.of(target("d0")._replace(dp_rank=rank)) for rank in (0, 1)]
    assert [load.foreign for load in loads] == [2, 2]
    assert loads[0].kv_capacity_bytes == 5e5


async def test_leans_move_once_a_second():
    """Ticks are four a second."""
    world = World(instance("d0"))
    async with world.running():
        await world.clock.advance(3.1)
    assert world.views.leans.pack == 3


async def test_an_engine_that_answers_nonsense_does_not_end_the_looks_at_others():
    """Whatever is raised: d1 is looked at all the same, now and later."""
    world = World(instance("d0"), instance("d1"))
    world.client.loads |= {"d0": ValueError("cannot convert float NaN to integer"), "d1": BUSY}
    async with world.running():
        assert world.loads.of(target("d1")).kv_capacity_bytes == 1e6
        world.client.loads["d1"] = dataclasses.replace(BUSY, kv_capacity_tokens=2000)
        await world.clock.advance(1.1)
        assert world.loads.of(target("d1")).kv_capacity_bytes == 2e6


async def test_after_a_restart_in_place_there_is_a_bound_at_once():
    """By the new process's own report, although its metrics cannot be had yet."""
    world = World(instance("d0", kv_capacity_tokens=4000))
    world.client.loads["d0"] = BUSY
    async with world.running():
        world.views.now(world.clock.now_s())
        world.client.loads["d0"] = UpstreamTimeout("busy")
        again = instance("d0", incarnation="d0-second", kv_capacity_tokens=3000)
        world.fleet = Fleet({again.id: again})
        await world.clock.advance(1.1)
        assert world.loads.of(target("d0")).kv_capacity_bytes == 3e6

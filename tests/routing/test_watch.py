"""Is it up, which incarnation is it: one instance under probes, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import pytest

from disagg_router.errors import UpstreamError, UpstreamTimeout
from disagg_router.model import Fingerprint, InstanceState
from disagg_router.routing.watch import InstanceWatch
from tests.builders import FINGERPRINT, instance
from tests.fakes.background import background
from tests.fakes.client import REPORT, FakeClient
from tests.fakes.clock import FakeClock, settle

DECLARED = instance("d0", state=InstanceState.STARTING, fingerprint=dataclasses.replace(FINGERPRINT, vllm_version=None))


class World:
    def __init__(self, declared=DECLARED):
        self.client, self.clock, self.changes = FakeClient(), FakeClock(), 0
        self.watch = InstanceWatch(
            declared, client=self.client, served_name="tiny", interval_s=1, clock=self.clock, changed=self.changed
        )

    def changed(self):
        self.changes += 1

    @property
    def state(self):
        return self.watch.seen.state

    @asynccontextmanager
    async def running(self):
        async with background(self.watch.run()):
            await settle()
            yield


async def test_a_ready_instance_has_described_itself():
    """What the operator declared and what the engine reports, together."""
    world = World()
    assert world.state is InstanceState.STARTING
    async with world.running():
        assert world.state is InstanceState.READY
        assert world.watch.seen.fingerprint == FINGERPRINT
        assert world.watch.seen.incarnation == "d0-first"
        assert world.watch.model_cards[0]["max_model_len"] == 8192


async def test_a_refused_connection_counts_at_once():
    """A killed engine is out within one interval."""
    world = World()
    async with world.running():
        world.client.health["d0"] = False
        await world.clock.advance(1)
        assert world.state is InstanceState.UNREACHABLE


async def test_c22_a_silent_engine_is_out_after_three_probes():
    """A busy one may miss one or two."""
    world = World()
    async with world.running():
        world.client.health["d0"] = UpstreamTimeout("silent")
        await world.clock.advance(2)
        assert world.state is InstanceState.READY
        await world.clock.advance(1)
        assert world.state is InstanceState.UNREACHABLE
        world.client.health["d0"] = True
        await world.clock.advance(1)
        assert world.state is InstanceState.READY


async def test_a_failed_request_brings_the_next_probe_forward():
    """Without waiting for the interval."""
    world = World()
    async with world.running():
        world.client.health["d0"] = False
        world.watch.poke()
        await settle()
        assert world.state is InstanceState.UNREACHABLE


@pytest.mark.parametrize(
    "report",
    [UpstreamError("no /version"), dataclasses.replace(REPORT, served_models=("other",))],
)
async def test_healthy_is_not_enough(report):
    """An engine that does not describe itself, or serves another model, takes no requests."""
    world = World()
    world.client.reports["d0"] = report
    async with world.running():
        assert world.state is InstanceState.STARTING
        world.client.reports["d0"] = REPORT
        await world.clock.advance(1)
        assert world.state is InstanceState.READY


@pytest.mark.parametrize("state", [InstanceState.FAILED, InstanceState.DRAINING])
async def test_what_the_controller_knows_better_wins(state):
    """Its process is gone, or must take nothing new, whatever the probe says."""
    world = World()
    async with world.running():
        world.watch.declare(dataclasses.replace(DECLARED, state=state))
        assert world.state is state


async def test_a_new_incarnation_has_to_prove_itself():
    """Its answers until then may still be the old process's."""
    world = World()
    async with world.running():
        world.watch.declare(dataclasses.replace(DECLARED, incarnation="d0-second"))
        assert world.state is InstanceState.UNREACHABLE
        await settle()
        assert (world.state, world.watch.seen.incarnation) == (InstanceState.READY, "d0-second")


async def test_a_restart_in_place_shows_before_the_source_hears_of_it():
    """The same pod or actor by name, another process by its own word."""
    world = World()
    world.client.reports["d0"] = dataclasses.replace(REPORT, incarnation="at-1")
    async with world.running():
        assert world.watch.seen.incarnation == "d0-first/at-1"
        world.client.health["d0"] = False
        await world.clock.advance(1)
        world.client.health["d0"] = True
        world.client.reports["d0"] = dataclasses.replace(REPORT, incarnation="at-2")
        await world.clock.advance(1)
        assert world.watch.seen.incarnation == "d0-first/at-2"


async def test_an_instance_nobody_launched_tells_its_incarnation_itself():
    """By its start time, or else by having been away."""
    world = World(dataclasses.replace(DECLARED, incarnation=""))
    world.client.reports["d0"] = dataclasses.replace(REPORT, incarnation="started-1")
    async with world.running():
        assert world.watch.seen.incarnation == "started-1"
        incarnations = []
        for health in (False, True, False, True):
            world.client.reports["d0"] = REPORT
            world.client.health["d0"] = health
            await world.clock.advance(1)
            incarnations.append(world.watch.seen.incarnation)
        assert incarnations[1] != incarnations[3]


async def test_a_contradiction_leaves_the_field_unknown():
    """Unknown means local only: the pair is refused by that field."""
    world = World()
    world.client.reports["d0"] = dataclasses.replace(REPORT, fingerprint=Fingerprint(block_size=128))
    async with world.running():
        assert world.state is InstanceState.READY
        assert world.watch.seen.fingerprint.block_size is None


async def test_an_answer_nobody_foresaw_costs_the_instance_not_the_router():
    """It is out until it makes sense again."""
    world = World()
    world.client.reports["d0"] = ZeroDivisionError()
    async with world.running():
        assert world.state is InstanceState.STARTING
        world.client.reports["d0"] = REPORT
        await world.clock.advance(1)
        assert world.state is InstanceState.READY


async def test_a_failure_reported_during_a_probe_asks_for_another():
    """The probe may have been answered before the failure."""
    world = World()
    healthy, probes = world.client.healthy, []

    async def slow(url):
        probes.append(url)
        await asyncio.sleep(0.01)
        return await healthy(url)

    world.client.healthy = slow
    async with world.running():
        world.watch.poke()
        await asyncio.sleep(0.05)
        assert len(probes) == 2


async def test_nothing_is_published_while_nothing_changes():
    """A fleet of 64 probed every second must not wake everybody every time."""
    world = World()
    async with world.running():
        changes = world.changes
        await world.clock.advance(10)
        assert world.changes == changes

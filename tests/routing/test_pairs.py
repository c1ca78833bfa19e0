"""When a pair is tested, tested again, refused; on a clock that the test moves."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import pytest

from disagg_router.errors import DisaggError
from disagg_router.model import InstanceState, PairState
from disagg_router.routing.pairs import PairTester
from tests.builders import FINGERPRINT, instance, pair
from tests.fakes.background import background
from tests.fakes.clock import FakeClock, settle


class World:
    def __init__(self):
        self.clock, self.tests, self.outcomes, self.changes = FakeClock(), [], [], 0
        self.instances = {i.id: i for i in (instance("p0"), instance("d0"))}
        self.tester = self.new_tester(self.test, 0.05)

    def new_tester(self, test, limit_s):
        return PairTester(test, retest_s=10, limit_s=limit_s, soft_roles=False, clock=self.clock, changed=self.changed)

    async def test(self, prefill, decode):
        self.tests.append((prefill.incarnation, decode.incarnation))
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome == "hang":
            await asyncio.Event().wait()
        if outcome:
            raise DisaggError(outcome)

    def changed(self):
        self.changes += 1

    def set(self, name, **changes):
        old = self.instances[name]
        self.instances = {**self.instances, old.id: dataclasses.replace(old, **changes)}
        self.tester.update(self.instances)

    @property
    def status(self):
        return self.tester.statuses()[pair("p0", "d0")]

    @asynccontextmanager
    async def running(self):
        self.tester.update(self.instances)
        async with background(self.tester.run()):
            await settle()
            yield


async def test_a_pair_is_tested_before_it_is_ready():
    """And the publisher hears of every step."""
    world = World()
    world.tester.update(world.instances)
    assert world.status.state is PairState.UNTESTED
    async with world.running():
        assert world.status.state is PairState.READY
        assert world.tests == [("p0-first", "d0-first")]
        assert world.changes == 2


async def test_incompatible_engines_are_refused_without_a_test():
    """With the field and both values in the reason."""
    world = World()
    world.set("d0", fingerprint=dataclasses.replace(FINGERPRINT, block_size=16))
    async with world.running():
        assert world.status.state is PairState.REFUSED
        assert world.status.reason == "block_size differs: prefill 32, decode 16"
        assert world.tests == []
        world.set("d0", fingerprint=FINGERPRINT)
        await settle()
        assert world.status.state is PairState.READY


@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_a_restarted_end_is_tested_again(name):
    """The old test says nothing about the new process."""
    world = World()
    async with world.running():
        world.set(name, state=InstanceState.UNREACHABLE)
        await settle()
        assert world.tests == [("p0-first", "d0-first")]
        world.set(name, state=InstanceState.READY, incarnation="second")
        assert world.status.state is PairState.UNTESTED
        await settle()
        assert (len(world.tests), world.status.state) == (2, PairState.READY)


async def test_the_same_process_coming_back_needs_no_new_test():
    """It missed some probes, it did not die."""
    world = World()
    async with world.running():
        world.set("d0", state=InstanceState.UNREACHABLE)
        await settle()
        world.set("d0", state=InstanceState.READY)
        await settle()
        assert (len(world.tests), world.status.state) == (1, PairState.READY)


async def test_a_failed_test_is_repeated_at_growing_distances():
    """10, 20, 40 s: a pair that answers wrong costs little and gets its chance."""
    world = World()
    world.outcomes = ["wrong", "wrong", "wrong", None]
    async with world.running():
        assert world.status.reason == "wrong"
        for wait_s, tests in ((9, 1), (2, 2), (18, 2), (3, 3), (37, 3), (2, 4)):
            await world.clock.advance(wait_s)
            assert len(world.tests) == tests
        assert world.status.state is PairState.READY


async def test_a_test_that_hangs_ends_at_its_limit():
    """Nothing waits for ever."""
    world = World()
    world.outcomes = ["hang"]
    async with world.running():
        assert world.status.state is PairState.TESTING
        await asyncio.sleep(0.1)
        assert world.status.state is PairState.FAILED
        assert "longer than 0.05 s" in str(world.status.reason)


async def test_a_verdict_about_an_end_that_was_replaced_meanwhile_is_dropped():
    """It speaks of a process that is gone."""
    world = World()
    world.outcomes = ["hang", "wrong"]
    async with world.running():
        world.set("p0", incarnation="second")
        await asyncio.sleep(0.1)
        assert world.status.reason == "wrong"
        assert world.tests[1] == ("second", "d0-first")


async def test_the_test_of_an_end_that_was_replaced_is_ended():
    """It would hold a slot until its limit."""
    world = World()
    world.outcomes = ["hang"]
    world.tester = world.new_tester(world.test, 1000)
    async with world.running():
        world.set("p0", incarnation="second")
        await settle()
        assert (len(world.tests), world.status.state) == (2, PairState.READY)


async def test_one_decode_instance_is_tested_with_one_prefill_at_a_time():
    """The test counts what that engine pulls, and must not count another's."""
    world, running, most = World(), 0, 0

    async def test(prefill, decode):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    world.instances = {i.id: i for i in (instance("p0"), instance("p1"), instance("p2"), instance("d0"))}
    world.tester = world.new_tester(test, 1)
    async with world.running():
        await asyncio.sleep(0.2)
        assert {status.state for status in world.tester.statuses().values()} == {PairState.READY}
    assert most == 1


async def test_an_answer_nobody_foresaw_costs_the_pair_not_the_router():
    """It fails, and is tried again."""
    world = World()

    async def test(prefill, decode):
        raise ZeroDivisionError

    world.tester = world.new_tester(test, 1)
    async with world.running():
        assert "unforeseen way (ZeroDivisionError)" in str(world.status.reason)


async def test_a_down_instance_is_not_tested():
    """It would only fail, and be avoided for longer once it is back."""
    world = World()
    world.outcomes = ["wrong"]
    async with world.running():
        world.set("d0", state=InstanceState.UNREACHABLE)
        await world.clock.advance(100)
        assert len(world.tests) == 1
        world.set("d0", state=InstanceState.READY)
        await settle()
        assert world.status.state is PairState.READY


async def test_a_pair_goes_with_its_instance():
    """An instance that left the fleet leaves nothing behind."""
    world = World()
    async with world.running():
        world.tester.update({})
        assert world.tester.statuses() == {}

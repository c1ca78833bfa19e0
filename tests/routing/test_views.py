"""The picture a policy decides on."""

from __future__ import annotations

import dataclasses
import math

import pytest

from disagg_router.interfaces import Claim, EngineLoad
from disagg_router.model import InstanceId, InstanceState, PairState
from disagg_router.routing.fleet import Fleet, PairStatus
from disagg_router.routing.loads import Loads
from disagg_router.routing.views import Views
from tests.builders import COSTS, instance, pair, target
from tests.fakes.clock import FakeClock
from tests.fakes.costs import FixedCosts


class World:
    def __init__(self, *instances, pairs=None):
        self.clock = FakeClock()
        self.fleet = Fleet({i.id: i for i in instances}, pairs or {}, soft_roles=True)
        costs = FixedCosts(COSTS)
        self.loads = Loads(costs=costs, now_s=self.clock.now_s)
        self.views = Views(lambda: self.fleet, self.loads, costs)

    def view(self):
        return self.views.now(self.clock.now_s())


def test_the_view_holds_ready_targets_and_tested_pairs_only():
    """A policy cannot choose what it does not see."""
    pairs = {
        pair("p0", "d0"): PairStatus(PairState.READY),
        pair("p1", "d0"): PairStatus(PairState.REFUSED, "x"),
        pair("p0", "d1"): PairStatus(PairState.TESTING),
    }
    away = instance("d1", state=InstanceState.UNREACHABLE)
    view = World(instance("p0"), instance("p1"), instance("d0"), away, pairs=pairs).view()
    assert [t.target for t in view.targets] == [target("p0"), target("p1"), target("d0")]
    assert view.partners == {InstanceId("d0"): (0,)}
    assert view.soft_roles


def test_each_rank_is_a_target():
    """An instance with two data-parallel ranks is two."""
    view = World(instance("d0", dp_size=2)).view()
    assert [(t.target.instance, t.target.dp_rank) for t in view.targets] == [("d0", 0), ("d0", 1)]


def test_a_new_target_has_a_bound_before_anybody_has_probed_it():
    """What the engine said of itself when it came: 4,000 tokens over two ranks, 1,000 bytes each."""
    world = World(instance("d0", dp_size=2, kv_capacity_tokens=4000), instance("d1"))
    assert [t.load.kv_capacity_bytes for t in world.view().targets] == [2e6, 2e6, math.inf]
    world.loads.reconcile(target("d0"), EngineLoad(0, 0, 0.0, kv_capacity_tokens=3000))
    world.fleet = dataclasses.replace(world.fleet, soft_roles=False)
    assert world.view().targets[0].load.kv_capacity_bytes == 3e6


def test_a_lease_shows_in_the_next_view_and_in_no_other_target():
    """What has not changed is the same object as before."""
    world = World(instance("d0"), instance("d1"))
    before = world.view()
    with world.loads.leases.decode(target("d0"), Claim(100.0), streamed=True):
        now = world.view()
        assert now.targets[0].load.decodes == 1
        assert now.targets[1] is before.targets[1]
    assert world.view().targets[0].load.decodes == 0


@pytest.mark.parametrize("change", ["gone", "state"])
def test_a_fleet_that_changes_changes_the_view(change):
    """At once, with the next decision."""
    world = World(instance("d0"), instance("d1"))
    world.view()
    away = dataclasses.replace(instance("d1"), state=InstanceState.DRAINING)
    instances = {i: x for i, x in world.fleet.instances.items() if i != "d1"}
    world.fleet = Fleet(instances if change == "gone" else {**instances, InstanceId("d1"): away})
    assert [t.target for t in world.view().targets] == [target("d0")]

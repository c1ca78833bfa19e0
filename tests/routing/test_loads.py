"""Loads: what a policy sees of a target is what the books say, and is built no more often than needed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from disagg_router.interfaces import EngineLoad
from disagg_router.model import Slo, Target
from disagg_router.routing.loads import Loads
from disagg_router.view import StreamLoad, TargetLoad
from tests.builders import target
from tests.fakes.costs import CLAIM, FixedCosts
from tests.fakes.now import Now

P0, D0 = target("p0"), target("d0")
SLO = Slo(ttft_s=1.0, tpot_s=0.1, max_gap_s=0.5)
ROOM = EngineLoad(running=0, waiting=0, kv_usage=0.0, kv_capacity_tokens=1000)


class World:
    def __init__(self) -> None:
        self.now, self.costs = Now(), FixedCosts()
        self.loads = Loads(costs=self.costs, now_s=self.now)

    def open_stream(self, one: Target = D0) -> None:
        self.loads.streams.open(one, SLO, prompt_tokens=100, expected_tokens=11, max_tokens=None, now_s=self.now.s)


def test_nothing_held_is_an_idle_target():
    """The view's own default."""
    world = World()
    assert world.loads.all((P0, D0)) == (TargetLoad(), TargetLoad())
    assert world.loads.of(P0) == TargetLoad()


def test_a_request_in_each_of_its_phases():
    """Prefilling, handed off, streaming, over."""
    world = World()
    for one in (P0, D0):
        world.loads.reconcile(one, ROOM)
    known: dict[str, Any] = {"kv_capacity_bytes": 100_000.0}
    leases = world.loads.leases
    decode, prefill = leases.decode(D0, CLAIM, streamed=True), leases.prefill(P0, CLAIM, observed=True)
    handoff = leases.handoff(P0, D0, CLAIM)
    assert world.loads.all((P0, D0)) == (
        TargetLoad(
            prefills=1, prefill_tokens=40, prefills_end_s=0.05, kv_free_bytes=96_000.0, pinned_bytes=4000.0, **known
        ),
        TargetLoad(decodes=1, kv_free_bytes=95_000.0, **known),
    )
    prefill.done()
    handoff.answered()
    assert world.loads.all((P0, D0)) == (
        TargetLoad(handoffs=1, kv_free_bytes=96_000.0, pinned_bytes=4000.0, out_bytes=3000.0, **known),
        TargetLoad(decodes=1, kv_free_bytes=95_000.0, in_bytes=3000.0, **known),
    )
    handoff.release()
    world.open_stream()
    streams = StreamLoad(1, 100, 11.0, (0, 0, 0, 0, 0, 1, 0, 0), 1, 0.5)
    assert world.loads.all((P0, D0)) == (
        TargetLoad(kv_free_bytes=100_000.0, **known),
        TargetLoad(decodes=1, kv_free_bytes=95_000.0, streams=streams, **known),
    )
    decode.release()
    assert world.loads.of(D0).decodes == 0


def test_demand_shows():
    """0.2 s of prefill with a step of 0.6 s, just now."""
    world = World()
    world.loads.demand.placed(P0, predicted_s=0.2, steps=2, stalls=1.0, kv_bytes=1.0, now_s=0.0)
    load = world.loads.of(P0)
    assert (load.prefill_share, load.prefill_steps_per_s, load.stalls_per_s) == pytest.approx((0.2, 2.0, 1.0))


def test_what_has_not_changed_is_the_same_object():
    """A change at one target builds that one only."""
    world, targets = World(), (P0, D0)
    world.loads.reconcile(P0, ROOM)
    first = world.loads.all(targets)
    assert world.loads.all(targets) is first
    world.loads.leases.decode(D0, CLAIM, streamed=True)
    second = world.loads.all(targets)
    assert second[0] is first[0]
    assert second[1] != first[1]


def test_a_load_grows_old():
    """A prefill that overruns looks worse after a tenth of a second, with nothing else going on."""
    world, targets = World(), (P0,)
    lease = world.loads.leases.prefill(P0, CLAIM, observed=True)
    assert world.loads.all(targets)[0].prefills_end_s == pytest.approx(0.05)
    world.now.s = 0.09
    assert world.loads.all(targets)[0].prefills_end_s == pytest.approx(0.05)
    world.now.s = 1.05
    assert world.loads.all(targets)[0].prefills_end_s == pytest.approx(1.55)
    lease.release()
    assert world.loads.all(targets)[0].prefills_end_s == -math.inf


def test_many_old_loads_are_built_over_several_decisions():
    """Or all of them by the next tick."""
    world = World()
    targets = tuple(target(f"p{index}") for index in range(20))
    for one in targets:
        world.loads.leases.prefill(one, CLAIM, observed=True)
    world.loads.all(targets)
    world.now.s = 1.05

    def fresh() -> int:
        return sum(load.prefills_end_s > 1.0 for load in world.loads.all(targets))

    assert [fresh(), fresh(), fresh()] == [2, 4, 6]
    world.now.s = 2.05
    world.loads.tick()
    assert all(load.prefills_end_s > 2.0 for load in world.loads.all(targets))


def test_a_tick_reports_what_was_observed():
    """A prefill whose successor is at work, and the steps of a stream."""
    world = World()
    first = world.loads.leases.prefill(P0, CLAIM, observed=True)
    world.loads.leases.prefill(P0, CLAIM, observed=True)
    world.now.s = 0.06
    first.done()
    stream = world.loads.streams.open(D0, SLO, prompt_tokens=100, expected_tokens=11, max_tokens=None, now_s=0.06)
    world.loads.tick()
    for _ in range(10):
        world.now.s += 0.02
        stream.count(1, world.now.s)
    world.loads.tick()
    assert [(one, seconds) for one, _, seconds, _ in world.costs.prefills] == [(P0, pytest.approx(0.06))]
    assert [(one, seconds) for one, _, _, seconds, _ in world.costs.steps] == [(D0, pytest.approx(0.02))]


def test_another_fleet():
    """The same target stands in another place."""
    world = World()
    world.loads.leases.decode(D0, CLAIM, streamed=True)
    assert [load.decodes for load in world.loads.all((P0, D0))] == [0, 1]
    assert [load.decodes for load in world.loads.all((D0,))] == [1]
    assert world.loads.all(()) == ()
    world.loads.tick()


def test_a_forgotten_target_is_idle():
    """Another process has none of it; the leases end with their requests."""
    world, targets = World(), (P0,)
    world.loads.reconcile(P0, EngineLoad(running=3, waiting=0, kv_usage=0.5, kv_capacity_tokens=1000))
    world.loads.demand.placed(P0, predicted_s=0.2, steps=2, stalls=1.0, kv_bytes=1.0, now_s=0.0)
    assert world.loads.all(targets)[0].foreign == 3
    world.loads.forget(P0)
    assert world.loads.all(targets) == (TargetLoad(),)


def test_what_it_costs():
    """Printed, not asserted: the CPU time of a request's leases and stream, of a chunk, and of 64 targets' loads."""
    world = World()
    targets = tuple(target(f"p{index}") for index in range(64))
    for one in targets:
        world.loads.reconcile(one, ROOM)
        for _ in range(10):
            world.open_stream(one)
    kept = world.loads.streams.open(P0, SLO, prompt_tokens=1, expected_tokens=9, max_tokens=None, now_s=0.0)

    def request() -> None:
        leases = world.loads.leases
        with leases.decode(D0, CLAIM, streamed=True), leases.handoff(P0, D0, CLAIM) as handoff:
            with leases.prefill(P0, CLAIM, observed=True) as prefill:
                prefill.done()
            handoff.answered()
            world.loads.streams.open(D0, SLO, prompt_tokens=100, expected_tokens=11, max_tokens=None, now_s=0.0).close()

    def three() -> None:
        for one in targets[:3]:
            world.loads.leases.decode(one, CLAIM, streamed=True).release()
        world.loads.all(targets)

    rows = {
        "a request's leases and stream": _cpu_us(request, 500),
        "a chunk": _cpu_us(lambda: kept.count(1, 0.0), 5000),
        "64 loads, none changed": _cpu_us(lambda: world.loads.all(targets), 2000),
        "64 loads, 3 changed (3 leases included)": _cpu_us(three, 500),
        "64 loads of 10 streams, a tick": _cpu_us(world.loads.tick, 50),
    }
    print(*(f"{name}: {us:.2f} us" for name, us in rows.items()), sep="\n")


def _cpu_us(run: Callable[[], object], times: int) -> float:
    """The best of five, for the machine has other things to do."""
    best = math.inf
    for _ in range(5):
        start_s = time.process_time()
        for _ in range(times):
            run()
        best = min(best, (time.process_time() - start_s) / times)
    return best * 1e6


def test_answers_that_outgrow_their_claims_take_room():
    """11 tokens were expected and claimed; 40 have come, of 100 bytes each."""
    world = World()
    world.loads.reconcile(D0, ROOM)
    lease = world.loads.leases.decode(D0, CLAIM, streamed=True)
    before = world.loads.of(D0).kv_free_bytes
    stream = world.loads.streams.open(
        D0, SLO, prompt_tokens=100, expected_tokens=11, max_tokens=None, now_s=world.now.s
    )
    stream.count(40, world.now.s)
    world.now.s += 1.0
    assert world.loads.of(D0).kv_free_bytes == before - 29 * 100
    stream.close()
    assert world.loads.of(D0).kv_free_bytes == before
    lease.release()

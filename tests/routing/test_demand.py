"""What prefills have asked for lately: decayed sums over decayed time, with a time constant of 20 s."""

from __future__ import annotations

import math

import pytest

from disagg_router.model import Target
from disagg_router.routing.demand import DemandBook
from tests.builders import target

P0, P1 = target("p0"), target("p1")


def book() -> DemandBook:
    touched: set[Target] = set()
    return DemandBook(touched=touched, now_s=0.0)


def place(demand: DemandBook, now_s: float, *, seconds: float = 0.2, one: Target = P0, stalls: float = 0.1) -> None:
    demand.placed(one, predicted_s=seconds, steps=3, stalls=stalls, kv_bytes=1000.0, now_s=now_s)


def test_a_steady_demand_is_its_own_average():
    """0.2 s of prefill every second for two minutes, half-way between two of them: a share of 0.2, to 1 %."""
    demand = book()
    for second in range(120):
        place(demand, float(second))
    assert demand.of(P0, 119.5).prefill_s == pytest.approx(0.2, rel=0.01)
    assert demand.of(P0, 119.5).steps == pytest.approx(3, rel=0.01)
    assert demand.kv_bytes_per_s(119.5) == pytest.approx(1000, rel=0.01)


def test_it_fades():
    """20 s after the last one a 1/e is left of the sum; the time it is spread over is full either way."""
    demand = book()
    for second in range(201):
        place(demand, float(second))
    before, after = demand.of(P0, 200.0).prefill_s, demand.of(P0, 220.0).prefill_s
    assert after / before == pytest.approx(math.exp(-1), rel=0.001)


def test_what_is_long_over_is_nothing():
    """Exactly, so that a target at rest looks like one that was never used."""
    demand = book()
    place(demand, 0.0, stalls=1.0)
    assert demand.of(P0, 1000.0) == (0.0, 0.0, 0.0, 0.0)


def test_a_young_average_is_spread_over_a_second():
    """0.3 s of work known of for an instant is no share of infinity."""
    demand = book()
    place(demand, 0.0, seconds=0.3)
    assert demand.of(P0, 0.0).prefill_s == pytest.approx(0.3)


def test_a_share_stays_below_one():
    """5 s of work per second would be no share."""
    demand = book()
    for second in range(60):
        place(demand, float(second), seconds=5.0)
    assert demand.of(P0, 60.0).prefill_s == 0.97


def test_stalls_are_a_rate_too():
    """Half a stall in the first second, by its chance."""
    demand = book()
    place(demand, 0.0, stalls=0.5)
    assert demand.of(P0, 0.0).stalls == 0.5


def test_targets_have_their_own_and_the_fleet_has_the_sum():
    """Forgetting one leaves the fleet's history as it was."""
    demand = book()
    place(demand, 0.0, seconds=0.2, one=P0)
    place(demand, 0.0, seconds=0.3, one=P1)
    assert demand.of(P0, 0.0).prefill_s == pytest.approx(0.2)
    assert demand.of(P1, 0.0).prefill_s == pytest.approx(0.3)
    demand.forget(P0)
    assert demand.of(P0, 0.0).prefill_s == 0.0
    assert demand.kv_bytes_per_s(0.0) == pytest.approx(2000)

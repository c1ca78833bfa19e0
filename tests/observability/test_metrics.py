"""What is read off the router's parts at scrape time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from disagg_router.interfaces import Claim
from disagg_router.model import InstanceId, PairState, Target
from disagg_router.observability.gauges import Readings
from disagg_router.observability.metrics import TTFT_ERROR_EDGES, Metrics
from disagg_router.routing.fleet import Fleet, PairStatus
from disagg_router.routing.leases import LeaseBook
from disagg_router.routing.prefix_index import PrefixIndex
from disagg_router.routing.streams import StreamBook
from disagg_router.timing import LinkTiming
from disagg_router.view import Leans, StreamLoad, TargetLoad
from tests.builders import COSTS, TIMING, instance, pair, target
from tests.fakes.costs import FixedCosts

FIRST, SECOND = target("d0"), Target(InstanceId("d0"), 1)
FLEET = Fleet(
    instances={InstanceId("p0"): instance("p0"), InstanceId("d0"): instance("d0", dp_size=2)},
    pairs={pair("p0", "d0"): PairStatus(PairState.READY)},
)


def book() -> LeaseBook:
    costs, touched = FixedCosts(), set()
    return LeaseBook(costs=costs, streams=StreamBook(costs, touched), touched=touched, now_s=lambda: 0.0)


def page(leases: LeaseBook | None = None, **readings) -> dict:
    """(name, label values in the order of their names) -> value."""
    metrics = Metrics()
    metrics.watch(lambda: FLEET, leases or book(), PrefixIndex(1000), Readings(**readings))
    found = [
        ((sample.name, *(value for _, value in sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    ]
    assert len(found) == len(dict(found)), "a series is there twice"
    return dict(found)


def test_what_is_not_given_is_left_out():
    """A page with the fleet alone."""
    names = {key[0] for key in page()}
    assert "disagg_instance_up" in names
    assert not names & {"disagg_queue_waiting", "disagg_cost_seconds", "disagg_lean", "disagg_kv_events_total"}


def test_leases_in_bytes_add_up_over_ranks():
    """One series per kind and instance."""
    leases = book()
    leases.decode(FIRST, Claim(decode_kv_bytes=1000.0), streamed=True)
    leases.decode(SECOND, Claim(decode_kv_bytes=500.0), streamed=True)
    leases.handoff(target("p0"), FIRST, Claim(decode_kv_bytes=0.0, prefill_kv_bytes=8.0))
    shown = page(leases)
    assert shown["disagg_lease_bytes", "d0", "decode"] == 1500
    assert shown["disagg_leases", "d0", "decode"] == 2
    assert shown["disagg_lease_bytes", "p0", "handoff"] == 8


def test_the_cost_model():
    """1,000 tokens: 10 ms + 1,000 x 0.1 ms; a step beside 5 streams: 9 ms + 5 x 1 ms; d0 is the mean of its ranks, one
    of them idle, the other twice as slow at prefilling."""
    slow = dataclasses.replace(TIMING, prefill_a_s=0.02, prefill_b_s=2e-4)
    costs = dataclasses.replace(
        COSTS, targets={SECOND: slow}, links={pair("p0", "d0"): LinkTiming(handoff_s=0.05, bytes_per_s=2e9)}
    )
    busy = TargetLoad(streams=StreamLoad(running=5))
    shown = page(costs=lambda: costs, load=lambda one: busy if one == FIRST else TargetLoad())
    assert shown["disagg_cost_seconds", "p0", "prefill_1000"] == pytest.approx(0.110)
    assert shown["disagg_cost_seconds", "d0", "prefill_1000"] == pytest.approx((0.110 + 0.220) / 2)
    assert shown["disagg_cost_seconds", "d0", "decode_step"] == pytest.approx((0.014 + 0.009) / 2)
    assert shown["disagg_link_bytes_per_second", "d0", "p0"] == 2e9
    assert shown["disagg_link_handoff_seconds", "d0", "p0"] == 0.05


def test_costs_without_loads():
    """The step of an idle target, and the default link."""
    shown = page(costs=lambda: COSTS)
    assert shown["disagg_cost_seconds", "d0", "decode_step"] == pytest.approx(0.009)
    assert shown["disagg_link_bytes_per_second", "d0", "p0"] == 1e9


def test_leans():
    """Of the fleet's instances only; 0 for one that has none."""
    leans = Leans({target("p0"): -1.0, target("gone"): 1.0})
    shown = page(leans=lambda: leans)
    assert shown["disagg_lean", "p0"] == -1
    assert shown["disagg_lean", "d0"] == 0
    assert ("disagg_lean", "gone") not in shown


def test_queue_and_counters():
    """As they are now; counters end in _total."""
    shown = page(
        queue_waiting=lambda: 7,
        kv_events=lambda: {InstanceId("d0"): {"gaps": 2, "resets": 1}},
        tokenizer=lambda: {"local": 9, "engine": 1},
        decision_log=lambda: {"dropped": 3},
    )
    assert shown[("disagg_queue_waiting",)] == 7
    assert shown["disagg_kv_events_total", "d0", "gaps"] == 2
    assert shown["disagg_tokenizer_total", "engine"] == 1
    assert shown["disagg_decision_log_total", "dropped"] == 3


def test_the_readme_names_every_metric():
    """With all readings there are."""
    metrics = Metrics()
    metrics.watch(
        lambda: FLEET,
        book(),
        PrefixIndex(1000),
        Readings(
            queue_waiting=lambda: 0,
            costs=lambda: COSTS,
            leans=Leans,
            kv_events=dict,
            tokenizer=dict,
            decision_log=dict,
        ),
    )
    readme = (Path(__file__).parents[2] / "disagg_router" / "observability" / "README.md").read_text(encoding="utf-8")
    names = [
        family.name.removeprefix("disagg_") + ("_total" if family.type == "counter" else "")
        for family in metrics.registry.collect()
    ]
    assert len(names) > 20
    assert [name for name in names if f"`{name}`" not in readme] == []


def test_the_ratio_buckets_are_the_same_on_both_sides_of_1():
    """Half and double are equally wrong."""
    assert [1 / edge for edge in reversed(TTFT_ERROR_EDGES)] == pytest.approx(list(TTFT_ERROR_EDGES), rel=0.02)

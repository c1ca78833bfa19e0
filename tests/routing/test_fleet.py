"""The published fleet: what may be used, and which pairs are worth testing."""

from __future__ import annotations

from collections import Counter

import pytest

from disagg_router.model import InstanceId, InstanceState, PairState
from disagg_router.routing.fleet import Fleet, PairStatus, plan_pairs
from tests.builders import instance, pair


def fleet(*instances, pairs=None):
    return Fleet({i.id: i for i in instances}, pairs or {})


@pytest.mark.parametrize(
    ("instances", "whole"),
    [
        ([], False),
        ([instance("p0")], False),
        ([instance("d0")], True),
        ([instance("u0")], True),
        ([instance("p0"), instance("d0", state=InstanceState.UNREACHABLE)], False),
        ([instance("d0", state=InstanceState.DRAINING)], False),
    ],
)
def test_whole_requests_need_a_ready_instance_that_decodes(instances, whole):
    """Where roles are binding."""
    assert fleet(*instances).can_serve_whole() is whole


def test_with_soft_roles_any_ready_instance_serves_whole():
    """A prefill instance alone is enough."""
    assert Fleet({InstanceId("p0"): instance("p0")}, soft_roles=True).can_serve_whole()
    assert not Fleet(soft_roles=True).can_serve_whole()


@pytest.mark.parametrize(
    ("state", "settled"),
    [
        (PairState.UNTESTED, False),
        (PairState.TESTING, False),
        (PairState.READY, True),
        (PairState.FAILED, True),
        (PairState.REFUSED, True),
    ],
)
def test_a_fleet_is_settled_when_every_pair_has_its_first_verdict(state, settled):
    """Pairs of an instance that is not ready are not waited for."""
    pairs = {pair("p0", "d0"): PairStatus(state)}
    assert fleet(instance("p0"), instance("d0"), pairs=pairs).settled() is settled
    assert fleet(instance("p0"), instance("d0", state=InstanceState.STARTING), pairs=pairs).settled()


def test_a_few_instances_are_all_paired():
    """Every prefill with every decode, no instance with itself."""
    assert set(plan_pairs([instance("p0"), instance("p1"), instance("d0"), instance("d1")])) == {
        pair(p, d) for p in ("p0", "p1") for d in ("d0", "d1")
    }
    assert set(plan_pairs([instance("u0"), instance("u1")])) == {pair("u0", "u1"), pair("u1", "u0")}
    assert plan_pairs([instance("p0")]) == plan_pairs([instance("d0")]) == plan_pairs([]) == ()
    assert plan_pairs([instance("u0")]) == ()


def test_with_soft_roles_everybody_prefills_for_everybody():
    """Both ways round, whatever the role."""
    both = {pair("p0", "d0"), pair("d0", "p0")}
    assert set(plan_pairs([instance("p0"), instance("d0")], soft_roles=True)) == both
    many = plan_pairs([instance(f"u{i}") for i in range(64)], soft_roles=True)
    assert set(Counter(p.decode for p in many).values()) == set(Counter(p.prefill for p in many).values()) == {8}


@pytest.mark.parametrize(("prefills", "decodes"), [(64, 64), (16, 64), (64, 16), (3, 40), (40, 3)])
def test_many_instances_are_paired_sparsely_and_evenly(prefills, decodes):
    """Each decode has a partner, and nobody has many more than 8."""
    fleet = [instance(f"p{i}") for i in range(prefills)] + [instance(f"d{i}") for i in range(decodes)]
    pairs = plan_pairs(fleet)
    assert len(set(pairs)) == len(pairs)
    per_decode, per_prefill = Counter(p.decode for p in pairs), Counter(p.prefill for p in pairs)
    assert set(per_decode) == {InstanceId(f"d{i}") for i in range(decodes)}
    assert max(per_decode.values()) <= 8
    assert max(per_prefill.values()) <= max(8, -(-decodes // prefills))


def test_a_joining_instance_moves_few_pairs():
    """Pairs that have been tested are kept as far as the ring allows."""
    before = {instance(f"{kind}{i:02d}").id for kind in "pd" for i in range(4)}
    fleet = [instance(name) for name in before]
    assert set(plan_pairs(fleet)) <= set(plan_pairs([*fleet, instance("p04")]))

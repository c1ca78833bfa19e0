"""break_even: expected requests that meet their objectives, this one's and those it would disturb."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from disagg_router.errors import ConfigError, NoDecodeInstance
from disagg_router.model import Path, Reason, Slo
from disagg_router.policies.registry import build_policy
from disagg_router.timing import LinkTiming
from disagg_router.view import Leans, StreamLoad, TargetLoad
from tests.builders import COSTS, TIMING, request, target, view

LOCAL, REMOTE = Path.LOCAL, Path.REMOTE_PREFILL
CHAT = Slo(ttft_s=0.5, tpot_s=0.025, max_gap_s=0.1)
PATIENT = dataclasses.replace(CHAT, ttft_s=15.0)
# Six streams with time to spare, none of which has had too long a pause yet.
STREAMS = StreamLoad(
    running=6, context_tokens=1500.0, to_come_tokens=48.0, slack=(0, 0, 0, 0, 0, 3, 3, 0), unbroken=6, gap_s=0.1
)
SIX = TargetLoad(decodes=6, streams=STREAMS)


def decide(cluster, **changes):
    return build_policy("break_even", {}).decide(request(**{"slo": CHAT, "prompt_tokens": 200, **changes}), cluster)


def pair_view(**loads: TargetLoad):
    return view("u0", "u1", pairs="u0>u1 u1>u0", soft=True, **loads)


def split_view(**loads):
    return view("p0", "d0", pairs="p0>d0", **loads)


def test_a_long_prompt_leaves_the_streams_alone():
    """6,000 tokens would stop the six for 0.2 s at a time; the other instance is idle, so nothing needs to move."""
    decision = decide(pair_view(u0=SIX), prompt_tokens=6000, slo=PATIENT)
    assert (decision.path, decision.decode) == (LOCAL, target("u1"))


def test_a_long_prompt_goes_remote_while_decode_is_busy():
    """With roles: computed on p0, since on d0 it would break all six; both predictions are there."""
    decision = decide(split_view(d0=SIX), prompt_tokens=6000, slo=PATIENT)
    assert (decision.path, decision.prefill, decision.reason) == (REMOTE, target("p0"), Reason.PROTECTS_STREAMS)
    assert decision.terms["local_lost"] == pytest.approx(6, abs=0.1)
    # 6,000 tokens in three steps: 3 x 10 ms + 0.6 s; then 6 MB, 20 ms, and a step with seven streams.
    assert decision.ttft[REMOTE].mean_s == pytest.approx(0.63 + 0.006 + 0.02 + 0.016)
    assert decision.ttft[LOCAL].mean_s == pytest.approx(0.6 + 3 * 0.016)


def test_a_short_prompt_stays_local():
    """36 ms among the streams hurt nobody, and a handoff costs 20 ms."""
    decision = decide(split_view(d0=SIX))
    assert (decision.path, decision.reason) == (LOCAL, Reason.SHORT_PROMPT)
    assert decision.chance == pytest.approx(1.0, abs=0.01)


def test_streams_that_are_broken_already_are_not_protected():
    """They have no objective left to lose."""
    lost = STREAMS._replace(slack=(0,) * 8, unbroken=0)
    decision = decide(split_view(d0=TargetLoad(decodes=6, streams=lost)), prompt_tokens=6000, slo=PATIENT)
    assert decision.terms["local_lost"] == 0


def test_a_source_without_room_is_passed_over():
    """p0 is idle but full of streams' KV, p1 has a short queue; and where p1 is full too, decoding here is sooner."""
    full = TargetLoad(kv_capacity_bytes=8e6, kv_free_bytes=0, streams=STREAMS._replace(to_come_tokens=1e4))
    busy, long = TargetLoad(prefills=1, prefills_end_s=0.2), {"prompt_tokens": 6000, "slo": PATIENT}
    cluster = view("p0", "p1", "d0", pairs="p0>d0 p1>d0", p0=full, p1=busy, d0=SIX)
    assert decide(cluster, **long).prefill == target("p1")
    cluster = view("p0", "p1", "d0", pairs="p0>d0 p1>d0", p0=full, p1=full)
    assert decide(cluster, **long).path is LOCAL


@pytest.mark.parametrize(
    ("loads", "costs", "changes", "reason"),
    [
        ({}, COSTS, {}, Reason.SHORT_PROMPT),
        ({"p0": TargetLoad(prefills=1, prefills_end_s=5.0)}, COSTS, {}, Reason.PREFILL_BUSY),
        ({}, dataclasses.replace(COSTS, link=LinkTiming(0.001, 1e6)), {}, Reason.TRANSFER_SLOWER),
        ({"p0": TargetLoad(handoffs=1, out_bytes=2e9)}, COSTS, {}, Reason.LINK_BUSY),
        ({}, COSTS, {"cached_tokens": {target("d0"): 160}}, Reason.CACHE_HOT),
    ],
)
def test_why_it_stays_local(loads, costs, changes, reason):
    """The largest part of what makes the other way slower gives the reason its name."""
    decision = decide(dataclasses.replace(split_view(**loads), costs=costs), **changes)
    assert (decision.path, decision.reason) == (LOCAL, reason)


def test_a_decode_target_with_a_queue_of_prefills_is_passed_by():
    """0.4 s of them there, none at p0."""
    decision = decide(split_view(d0=TargetLoad(prefills=1, prefills_end_s=0.4)))
    assert (decision.path, decision.reason) == (REMOTE, Reason.DECODE_BUSY)


def test_the_target_that_holds_the_prompt_serves_the_next_turn():
    """990 of 1,000 tokens on u1, and nothing else to choose by."""
    decision = decide(pair_view(), prompt_tokens=1000, cached_tokens={target("u1"): 990})
    assert (decision.path, decision.decode, decision.reason) == (LOCAL, target("u1"), Reason.CACHE_HOT)


def test_recompute_when_what_is_held_elsewhere_is_not_worth_fetching():
    """u1 holds 64 of 200 tokens; it is busy, and to compute them again takes less than a handoff."""
    busy = TargetLoad(prefills=1, prefills_end_s=2.0)
    decision = decide(pair_view(u1=busy), cached_tokens={target("u1"): 64})
    assert (decision.path, decision.decode) == (Path.RECOMPUTE, target("u0"))
    assert Path.RECOMPUTE in decision.ttft


def test_decode_keeps_away_from_where_prefills_land():
    """Half a stall a second on u1: a chat of 96 tokens would meet one with 40 %. Its prompt harms nobody on u0."""
    stalling = TargetLoad(prefill_share=0.3, stalls_per_s=0.5)
    decision = decide(pair_view(u1=stalling, u0=SIX), output_tokens=96.0)
    assert decision.decode == target("u0")


def test_packing_holds_a_further_target_back_for_decoding():
    """Without a price the idle u1 is taken; with one, only when it leans to decoding already."""
    loads = {"u0": SIX._replace(decodes=6)}
    packed = dataclasses.replace(pair_view(**loads), leans=Leans(pack=1.5))
    leaning = dataclasses.replace(packed, leans=Leans({target("u1"): 0.5}, pack=1.5))
    assert [decide(v).decode.instance for v in (pair_view(**loads), packed, leaning)] == ["u1", "u0", "u1"]


def test_roles_are_binding_where_the_connector_does_not_let_them_be_soft():
    """A decode instance never prefills for another: d1, where chats would be stalled, has nothing else to do, and p0
    fourteen seconds of prefills. A prefill instance never decodes, even where d0 has two seconds of them before it."""
    stalling, behind = TargetLoad(prefill_share=0.3, stalls_per_s=2.0), TargetLoad(prefills=1, prefills_end_s=14.0)
    cluster = view("p0", "d0", "d1", pairs="p0>d0 d1>d0", p0=behind, d0=SIX, d1=stalling)
    decision = decide(cluster, prompt_tokens=6000, slo=PATIENT, output_tokens=96.0)
    assert (decision.decode, decision.prefill) == (target("d0"), target("p0"))
    assert decide(view("p0", "d0", d0=TargetLoad(prefills=1, prefills_end_s=2.0))).decode == target("d0")


@pytest.mark.parametrize(("names", "takes"), [(("p0", "d0"), "d0"), (("p0", "u0"), "u0"), (("p0",), "p0")])
def test_a_role_is_a_preference_with_a_price(names, takes):
    """All idle: whoever is meant for it decodes; alone, a prefill instance serves whole."""
    assert decide(view(*names, soft=True)).decode == target(takes)


def test_a_role_is_given_up_when_it_would_cost_more_than_its_price():
    """d0 has two seconds of prefills before it, which no chat can wait for."""
    cluster = view("p0", "d0", soft=True, d0=TargetLoad(prefills=1, prefills_end_s=2.0))
    assert decide(cluster).decode == target("p0")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"prompt_tokens": None}, Reason.NOT_COUNTED), ({"splittable": False}, Reason.NOT_SPLITTABLE)],
)
def test_what_cannot_be_split_or_judged_is_served_whole(changes, reason):
    """And says why."""
    decision = decide(split_view(), **changes)
    assert (decision.path, decision.decode, decision.reason) == (LOCAL, target("d0"), reason)


def test_no_target_is_an_error():
    """All have failed this request."""
    with pytest.raises(NoDecodeInstance):
        decide(view("u0", soft=True), excluded=frozenset({target("u0")}))


def test_a_path_nothing_is_known_of_is_tried_on_a_hundredth_of_the_requests():
    """Where it costs little; a tiebreak below 0.01 stands for the hundredth."""
    unknown = dataclasses.replace(COSTS, link=LinkTiming(0.02, 1e9, sd=5.0), target=TIMING)
    cluster = dataclasses.replace(split_view(), costs=unknown)
    decisions = [decide(cluster, tiebreak=tiebreak) for tiebreak in (0.005, 0.015)]
    assert [(d.path, d.reason) for d in decisions] == [(REMOTE, Reason.SAMPLED), (LOCAL, Reason.SHORT_PROMPT)]


@pytest.mark.parametrize(("sampled", "path"), [(0.0, LOCAL), (0.004, LOCAL), (0.006, REMOTE)])
def test_fewer_may_be_sampled(sampled, path):
    """None at all, too; a tiebreak of 0.005."""
    unknown = dataclasses.replace(COSTS, link=LinkTiming(0.02, 1e9, sd=5.0))
    asked = request(slo=CHAT, prompt_tokens=200, tiebreak=0.005)
    policy = build_policy("break_even", {"sampled": sampled})
    assert policy.decide(asked, dataclasses.replace(split_view(), costs=unknown)).path is path


@pytest.mark.parametrize("sampled", [-0.1, 0.02, "much"])
def test_more_than_a_hundredth_is_not_sampled(sampled):
    """Nor is what is no share."""
    with pytest.raises(ConfigError, match="sampled"):
        build_policy("break_even", {"sampled": sampled})


def test_equals_are_shared_out_by_the_tiebreak():
    """So that replicas do not march in step."""
    assert {decide(pair_view(), tiebreak=t).decode.instance for t in (0.1, 0.9)} == {"u0", "u1"}


def test_the_same_request_and_view_give_the_same_decision():
    """A policy is pure."""
    cluster = pair_view(u0=SIX)
    assert decide(cluster) == decide(cluster)


def test_many_targets_are_pruned_and_the_best_is_still_found():
    """64 targets, of which one holds the prompt and one alone is idle."""
    names = [f"u{i}" for i in range(64)]
    full = TargetLoad(prefills=1, prefills_end_s=3.0, decodes=8, streams=STREAMS._replace(running=8))
    loads: dict[str, Any] = {name: full for name in names if name != "u40"}
    assert decide(view(*names, soft=True, **loads), prompt_tokens=4000).decode == target("u40")
    held = decide(view(*names, soft=True), prompt_tokens=4000, cached_tokens={target("u7"): 3968})
    assert held.decode == target("u7")


def test_a_target_without_room_is_no_candidate_while_another_has_some():
    """u0 is idle and full, u1 works and has room. All full: it is taken as before, and has to wait."""
    full, works = TargetLoad(kv_free_bytes=1000.0), SIX._replace(kv_free_bytes=1e9)
    assert decide(pair_view(u0=full, u1=works)).decode == target("u1")
    assert decide(pair_view(u0=full, u1=SIX._replace(kv_free_bytes=1000.0))).decode == target("u0")

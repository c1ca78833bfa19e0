"""What serving a request would take, by hand from the builders' round numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from disagg_router.model import Decision, Path, Reason
from disagg_router.policies.forecast import decode_terms, local_way, predicted, prefill_terms, remote_way
from disagg_router.timing import LinkTiming, TargetTiming
from disagg_router.view import StreamLoad, TargetLoad
from tests.builders import COSTS, TIMING, request, target, view

STREAMS = StreamLoad(running=4, context_tokens=400.0)


def prefill(load=None, costs=COSTS, **changes):
    cluster = dataclasses.replace(view("u0", u0=load or TargetLoad()), costs=costs)
    return prefill_terms(request(**changes), cluster, cluster.targets[0])


@pytest.mark.parametrize(
    ("load", "changes", "queue_s", "whole_s", "stall_s", "pause_s"),
    [
        # 10 ms a step and 0.1 ms a token, in chunks of 2,048.
        (TargetLoad(), {"prompt_tokens": 1000}, 0.0, 0.11, 0.0, 0.11),
        (TargetLoad(), {"prompt_tokens": 4096}, 0.0, 0.4296, 0.0, 0.2148),
        (TargetLoad(), {"prompt_tokens": 1000, "cached_tokens": {target("u0"): 900}}, 0.0, 0.02, 0.0, 0.02),
        (TargetLoad(prefills_end_s=0.7), {"prompt_tokens": 1000}, 0.7, 0.11, 0.0, 0.11),
        # Four streams: a step takes 13 ms without the prompt, 14 with it; 2,044 tokens of it fit into one.
        (TargetLoad(streams=STREAMS), {"prompt_tokens": 1000}, 0.0, 0.114, 0.101, 0.114),
        (TargetLoad(streams=STREAMS), {"prompt_tokens": 4088}, 0.0, 0.4368, 0.4108, 0.2184),
    ],
)
def test_a_prefill(load, changes, queue_s, whole_s, stall_s, pause_s):
    """The queue, its own time, by how much it delays each stream there, and the longest pause it makes."""
    found = prefill(load, **changes)
    assert found.queue_s == pytest.approx(queue_s)
    assert found.times[0] == pytest.approx(whole_s)
    assert found.times[2:] == pytest.approx((stall_s, pause_s))


def test_attention_makes_the_last_chunk_the_longest():
    """2,048 of 4,096 tokens, the last of them on top of the first: c x 2,048 x (1,024 + 2,048)."""
    timing = TargetTiming(0.0, 0.0, 1e-9, 0.0, 0.0, 0.0, chunk_tokens=2048)
    times = timing.prefill(4096, 0)
    assert times.whole_s == pytest.approx(1e-9 * 4096 * 2048)
    assert times.pause_s == pytest.approx(1e-9 * 2048 * 3072)


def test_uncertainty_is_that_of_the_terms_a_prompt_is_made_of():
    """The token's price is known to 10 %, the step's not at all: short prompts are uncertain, long ones are not."""
    unsure = ((1.0, 0.0, 0.0), (0.0, 0.01, 0.0), (0.0, 0.0, 0.0))
    timing = dataclasses.replace(TIMING, prefill_covariance=unsure)
    short, long = timing.prefill(1, 0), timing.prefill(2000, 0)
    assert short.sd_s / short.whole_s == pytest.approx(0.01 / 0.0101, rel=1e-3)
    assert long.sd_s / long.whole_s == pytest.approx((0.01**2 + 0.02**2) ** 0.5 / 0.21, rel=1e-3)


@pytest.mark.parametrize(
    ("load", "running", "step_s", "first_step_s"),
    [
        (TargetLoad(), 0, 0.010, 0.010),
        (TargetLoad(decodes=4, streams=STREAMS), 4, 0.014, 0.014),
        (TargetLoad(decodes=6, streams=STREAMS), 6, 0.016, 0.016),  # two were promised and have not started
        (TargetLoad(foreign=2), 2, 0.012, 0.012),
        # It has 500 tokens to prefill: the first token waits for a step of 10 + 50 ms.
        (TargetLoad(prefills=1, prefill_tokens=500, prefills_end_s=0.06), 0, 0.010, 0.060),
    ],
)
def test_a_decode_target(load, running, step_s, first_step_s):
    """The step with this request in the batch, and the one that its first token waits for."""
    cluster = view("u0", u0=load)
    found = decode_terms(request(prompt_tokens=100), cluster, cluster.targets[0])
    assert (found.step_s, found.first_step_s) == (pytest.approx(step_s), pytest.approx(first_step_s))
    assert found.more_s == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("out_bytes", "in_bytes", "link_wait_s"), [(0, 0, 0.0), (1e8, 5e8, 0.39), (6e8, 5e8, 0.49), (1e7, 0, 0.0)]
)
def test_a_handoff_waits_for_what_is_in_flight_at_the_busier_end(out_bytes, in_bytes, link_wait_s):
    """Less the 0.11 s that its own prefill takes in the meantime."""
    loads: Any = {"p0": TargetLoad(out_bytes=out_bytes), "d0": TargetLoad(in_bytes=in_bytes)}
    cluster, asked = view("p0", "d0", **loads), request(prompt_tokens=1000, cached_tokens={target("d0"): 400})
    way = remote_way(
        asked,
        cluster,
        prefill_terms(asked, cluster, cluster.targets[0]),
        decode_terms(asked, cluster, cluster.targets[1]),
    )
    assert way.link_wait_s == pytest.approx(link_wait_s)
    assert way.transfer_s == pytest.approx(0.0006)  # 600 tokens of 1,000 bytes
    assert way.mean_s == pytest.approx(0.11 + link_wait_s + 0.0006 + 0.02 + 0.01)


@pytest.mark.parametrize(
    ("source", "room_wait_s"),
    [
        ({"kv_free_bytes": 1e6}, 0.0),
        # 1 MB is missing of the 2 that handoffs hold, which take 3 s to leave.
        ({"kv_free_bytes": 0, "pinned_bytes": 2e6, "out_bytes": 3e9}, 1.5),
        # The queue alone takes 0.5 s, and after its 2 s all of them have left.
        ({"kv_free_bytes": 0, "pinned_bytes": 1e6, "out_bytes": 15e8, "prefills_end_s": 0.5}, 1.5),
        # Streams hold it: each has 100 steps of 13 ms to go, and a third of the 3 MB is enough.
        ({"kv_free_bytes": 0, "streams": STREAMS._replace(to_come_tokens=100.0)}, 100 * 0.013 / 3),
        # No wait helps a prompt that never fits.
        ({"kv_free_bytes": 0, "kv_capacity_bytes": 9e5}, 0.0),
    ],
)
def test_a_handoff_waits_for_room_at_its_source(source, room_wait_s):
    """Until the KV of 1,000 tokens fits there; what it waits in the queue anyway is not counted twice."""
    loads: Any = {"p0": TargetLoad(**{"kv_capacity_bytes": 3e6, **source})}
    cluster, asked = view("p0", "d0", **loads), request(prompt_tokens=1000)
    prefill = prefill_terms(asked, cluster, cluster.targets[0])
    way = remote_way(asked, cluster, prefill, decode_terms(asked, cluster, cluster.targets[1]))
    assert way.room_wait_s == pytest.approx(room_wait_s)
    computed_s = prefill.queue_s + room_wait_s + prefill.times.whole_s
    assert way.mean_s == pytest.approx(computed_s + way.link_wait_s + 0.001 + 0.02 + 0.01)


def test_what_it_has_waited_is_part_of_its_ttft():
    """And the deviations of the parts add up."""
    costs = dataclasses.replace(
        COSTS, target=dataclasses.replace(TIMING, prefill_sd=0.3), link=LinkTiming(0.02, 1e9, sd=2.0)
    )
    cluster, asked = dataclasses.replace(view("p0", "d0"), costs=costs), request(prompt_tokens=1000, waited_s=3.0)
    source, sink = prefill_terms(asked, cluster, cluster.targets[0]), decode_terms(asked, cluster, cluster.targets[1])
    assert local_way(asked, source, sink).ttft == pytest.approx((3.11, 0.033))
    assert remote_way(asked, cluster, source, sink).sd_s == pytest.approx((0.033**2 + 0.042**2) ** 0.5)


def test_the_ttft_of_a_policy_that_predicts_nothing():
    """That of the way it chose; none for a prompt that nobody counted."""
    cluster = view("p0", "d0")
    remote = Decision(Path.REMOTE_PREFILL, target("d0"), Reason.POLICY, target("p0"))
    local = Decision(Path.LOCAL, target("d0"), Reason.POLICY)
    found = [predicted(request(prompt_tokens=1000), cluster, decision) for decision in (remote, local)]
    assert [one and round(one.mean_s, 4) for one in found] == [0.141, 0.11]
    assert predicted(request(), cluster, local) is None

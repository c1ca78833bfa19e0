"""One request through the router, against an engine client that does what the test says."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from disagg_router.errors import (
    Draining,
    NoDecodeInstance,
    NoPrefillInstance,
    QueueFull,
    UpstreamError,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from disagg_router.interfaces import Reserved
from disagg_router.model import HandoffResult, InstanceState, PairState, Path, Reason
from disagg_router.observability.requests import RequestRecord
from disagg_router.routing.fleet import PairStatus
from tests.builders import pair, request, target
from tests.fakes.client import Connecting
from tests.fakes.clock import settle
from tests.routing.router_world import BODY, LEASE_S, World


async def test_a_split_request_prefills_once_and_decodes_with_that_handoff():
    """Prefill leg first, decode leg second, the handoff's parameters in between."""
    world = World("p0", "d0")
    decision, answer = await world.ask()
    assert world.client.kinds() == [("prefill", "p0"), ("decode", "d0")]
    assert (decision.path, answer) == (Path.REMOTE_PREFILL, b'{"from": "d0"}')
    assert world.client.asked[1].body["kv_transfer_params"]["remote_engine_id"] == "p0-first"
    assert world.client.asked[1].call.once
    assert not world.client.asked[0].call.once
    assert world.seen.handoffs == [HandoffResult.SENT]
    assert world.at_rest()


async def test_a_local_request_is_one_call_with_the_clients_body():
    """And no kv_transfer_params in it."""
    world = World(policy="always_local")
    await world.ask()
    assert [one.kind for one in world.client.asked] == ["local"]
    assert world.client.asked[0].body == BODY
    assert world.client.asked[0].engine in ("d0", "d1")


@pytest.mark.parametrize(("stream", "limit_s"), [(True, 2), (False, 3)])
async def test_c06_an_unstreamed_answer_is_not_held_to_the_first_byte_limit(stream, limit_s):
    """It has no first byte before it is whole."""
    world = World(policy="always_local")
    await world.ask(stream=stream)
    assert world.client.asked[0].call.head_limit_s == limit_s


async def test_the_threshold_policy_gets_the_engines_own_count():
    """Long and short by the tokenizer's number; policies that do not ask for it cost no call."""
    for tokens, path in ((255, Path.LOCAL), (256, Path.REMOTE_PREFILL)):
        world = World(policy="threshold", tokens=tokens)
        assert (await world.ask())[0].path is path
        assert world.client.tokenized == 1
    world = World(policy="always_remote")
    await world.ask()
    assert world.client.tokenized == 0


@pytest.mark.parametrize(
    ("held_blocks", "uncached_tokens"),
    [(0, 320), (3, 320 - 96), (9, 320 - 288), (10, 320 - 288)],
)
async def test_c46_tokens_that_the_decode_target_holds_do_not_count(held_blocks, uncached_tokens):
    """320 tokens in blocks of 32; the last token is always computed, so a whole prompt that is held costs a block."""
    world = World("p0", "d0", policy="threshold", tokens=320)
    hashes = list(range(100, 100 + held_blocks))
    world.index.stored(target("d0"), hashes, None, list(range(32 * held_blocks)), 32)
    decision, _ = await world.ask()
    assert decision.terms["uncached_tokens"] == uncached_tokens
    assert decision.path is (Path.LOCAL if uncached_tokens < 256 else Path.REMOTE_PREFILL)


async def test_among_equals_the_one_that_holds_the_prompt_decodes():
    """Load comes first, the cache second."""
    world = World("d0", "d1", "d2", policy="threshold", tokens=320)
    world.index.stored(target("d1"), [1, 2], None, list(range(64)), 32)
    assert {(await world.ask())[0].decode.instance for _ in range(5)} == {"d1"}


@pytest.mark.parametrize(("endpoint", "field"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
async def test_the_prompt_is_the_one_its_endpoint_is_for(endpoint, field):
    """Whatever else stands beside it: an engine reads no other."""
    world, asked = World(policy="threshold"), []
    tokenize = world.client.tokenize

    async def note(url, body):
        asked.append(sorted(body))
        return await tokenize(url, body)

    world.client.tokenize = note
    body = {"prompt": "x", "messages": [], "model": "tiny"}
    async with world.router.route(request(endpoint=endpoint), body):
        assert asked == [sorted(["model", field])]


async def test_a_tokenizer_that_fails_costs_the_count_not_the_answer():
    """Served local, and the failure is counted."""
    world = World(policy="threshold")
    world.client.tokens = UpstreamTimeout("slow")
    assert (await world.ask())[0].reason is Reason.NOT_COUNTED
    assert [name for _, name in world.seen.failures] == ["UpstreamTimeout"] * 2


async def test_a_prompt_the_tokenizer_refuses_is_refused_before_any_prefill():
    """The generation would be refused too."""
    world = World(policy="threshold")
    world.client.tokens = UpstreamRefused(400, "application/json", b"too long")
    with pytest.raises(UpstreamRefused):
        await world.ask()
    assert world.client.asked == []


@pytest.mark.parametrize("error", [UpstreamError("reset"), UpstreamTimeout("slow"), UpstreamUnreachable("gone")])
async def test_c24_a_failed_prefill_is_tried_on_another(error):
    """The decode leg carries the second one's handoff; the first is suspected."""
    world = World("p0", "p1", "d0")
    world.client.script["p0"] = world.client.script["p1"] = [error]
    decision, _ = await world.ask()
    first, second, decode = world.client.asked
    assert (first.kind, second.kind, decode.kind) == ("prefill", "prefill", "decode")
    assert decision.prefill is not None
    assert first.engine != second.engine == decision.prefill.instance
    assert decode.body["kv_transfer_params"]["remote_engine_id"] == f"{second.engine}-first"
    assert world.suspected == [first.engine]
    assert world.at_rest()


async def test_c24_with_no_other_prefill_it_is_served_local():
    """A request that a living instance can serve succeeds."""
    world = World("p0", "d0")
    world.client.script["p0"] = [UpstreamUnreachable("gone")]
    decision, answer = await world.ask()
    assert (decision.path, decision.reason, answer) == (Path.LOCAL, Reason.NO_PREFILL, b'{"from": "d0"}')


async def test_c24_a_prefill_that_refuses_the_request_ends_it():
    """4xx goes to the client; nobody else is asked."""
    world = World()
    for name in ("p0", "p1"):
        world.client.script[name] = [UpstreamRefused(400, "application/json", b"no")]
    with pytest.raises(UpstreamRefused):
        await world.ask()
    assert [one.kind for one in world.client.asked] == ["prefill"]
    assert world.at_rest()


async def test_a_failed_decode_gets_a_new_handoff_never_the_old_one():
    """One handoff, one send: the retry prefills again."""
    world = World()
    world.client.script["d0"] = world.client.script["d1"] = [UpstreamError("reset")]
    await world.ask()
    assert [one.kind for one in world.client.asked] == ["prefill", "decode", "prefill", "decode"]
    assert world.client.asked[1].engine != world.client.asked[3].engine
    assert world.seen.handoffs == [HandoffResult.SENT, HandoffResult.SENT]


async def test_c56_a_request_that_breaks_two_engines_is_not_given_a_third():
    """It may be the request that kills them."""
    world = World("d0", "d1", "d2", policy="always_local")
    for name in ("d0", "d1", "d2"):
        world.client.script[name] = [UpstreamError("died")]
    with pytest.raises(UpstreamError):
        await world.ask()
    assert len(world.client.asked) == 2


async def test_engines_that_cannot_be_reached_do_not_count_as_broken():
    """They never saw the request: every one that is left may be tried."""
    world = World("d0", "d1", "d2", "d3", policy="always_local")
    for name in ("d0", "d1", "d2", "d3"):
        world.client.script[name] = [UpstreamUnreachable("gone")]
    with pytest.raises(UpstreamUnreachable):
        await world.ask()
    assert sorted(one.engine for one in world.client.asked) == ["d0", "d1", "d2", "d3"]
    assert world.at_rest()


async def test_c11_a_handoff_whose_decode_was_never_reached_is_released():
    """Through another decode instance that knows the prefill."""
    world = World("p0", "d0", "d1")
    world.client.script["d0"] = world.client.script["d1"] = [UpstreamUnreachable("gone"), None]
    await world.ask()
    await settle()
    kinds = [one.kind for one in world.client.asked]
    assert sorted(kinds) == ["decode", "decode", "prefill", "prefill", "release"]
    assert world.seen.handoffs == [HandoffResult.ABANDONED, HandoffResult.SENT]


@pytest.mark.parametrize(
    ("step", "kinds", "result"),
    [
        (Connecting(60), ["prefill", "decode", "release"], HandoffResult.ABANDONED),
        (60.0, ["prefill", "decode"], HandoffResult.SENT),
    ],
)
async def test_c11_a_client_that_leaves_after_the_prefill(step, kinds, result):
    """Before the decode leg was sent: exactly one release. After: the decode engine sees the hang-up and lets go
    itself; a release then could free blocks it still reads."""
    world = World("p0", "d0")
    world.client.script["d0"] = [step]
    task = asyncio.create_task(world.ask())
    await world.client.answered.wait()
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle()
    assert [one.kind for one in world.client.asked] == kinds
    assert world.seen.handoffs == [result]
    assert world.at_rest()


@pytest.mark.parametrize(("waited_s", "sent"), [(LEASE_S / 2, True), (LEASE_S / 2 + 0.001, False)])
async def test_a_handoff_past_half_its_lease_is_never_sent(waited_s, sent):
    """Past the lease the engine answers 200 with another prompt's KV. Checked as its first byte is about to leave:
    here it waits for a connection. It is prefilled again instead."""
    world = World("p0", "d0")
    world.client.script["d0"] = [Connecting(0.02)]
    asking = asyncio.create_task(world.ask())
    await world.client.answered.wait()
    await world.clock.advance(waited_s)
    await asking
    await settle()
    kinds = sorted(one.kind for one in world.client.asked if one.sent)
    assert kinds == (["decode", "prefill"] if sent else ["decode", "prefill", "prefill", "release"])
    assert world.seen.handoffs == ([HandoffResult.SENT] if sent else [HandoffResult.EXPIRED, HandoffResult.SENT])


@pytest.mark.parametrize("restarted", ["p0", "d0"])
async def test_c42_a_handoff_between_other_incarnations_is_never_sent(restarted):
    """From another prefill it is worth nothing; another decode may have another block size and answer wrong."""
    world = World("p0", "d0")
    world.client.script["d0"] = [Connecting(0.02)]
    asking = asyncio.create_task(world.ask())
    await world.client.answered.wait()
    world.change(restarted, incarnation="second", engine_id=None)
    await asking
    assert world.seen.handoffs == [HandoffResult.EXPIRED, HandoffResult.SENT]
    decodes = [one for one in world.client.asked if one.kind == "decode"]
    assert [one.sent for one in decodes] == [False, True]


async def test_a_handoff_of_a_pair_that_is_no_longer_tested_is_never_sent():
    """The decode came back as another process, and its pair waits for its test."""
    world = World("p0", "d0")
    world.client.script["d0"] = [Connecting(0.02)]
    asking = asyncio.create_task(world.ask())
    await world.client.answered.wait()
    world.fleet = dataclasses.replace(world.fleet, pairs={pair("p0", "d0"): PairStatus(PairState.UNTESTED)})
    decision, _ = await asking
    assert (decision.path, world.seen.handoffs) == (Path.LOCAL, [HandoffResult.EXPIRED])
    assert not any(one.sent for one in world.client.asked if one.kind == "decode")


async def test_c11_a_decode_leg_that_is_refused_releases_the_prefill():
    """Refused by its schema it never gets to where the engine would tell the prefill. The release holds nothing of
    the client's but the model's name: another field may be the one that was refused."""
    world = World("p0", "d0")
    world.client.script["d0"] = [UpstreamRefused(400, "application/json", b"logprobs must be a number")]
    with pytest.raises(UpstreamRefused):
        await world.ask()
    await settle()
    [release] = [one for one in world.client.asked if one.kind == "release"]
    assert sorted(release.body) == ["kv_transfer_params", "max_tokens", "model", "prompt"]
    assert release.call.path == "/v1/completions"
    assert world.at_rest()


async def test_a_prefill_that_answers_nonsense_is_a_failed_prefill():
    """No JSON, or another engine's handoff: the request goes on without it."""
    world = World("p0", "d0")
    world.change("p0", engine_id="p0-other")
    decision, _ = await world.ask()
    assert (decision.path, decision.reason) == (Path.LOCAL, Reason.NO_PREFILL)
    assert world.seen.failures == [("p0", "UpstreamError")]


async def test_c31_no_decode_instance_is_said_at_once():
    """With its own code, and no prefill is spent."""
    world = World()
    for name in ("d0", "d1"):
        world.change(name, state=InstanceState.UNREACHABLE)
    with pytest.raises(NoDecodeInstance):
        await world.ask()
    assert world.client.asked == []


async def test_a_forced_remote_path_that_fails_is_not_served_another_way():
    """The client asked for this one."""
    world = World("p0", "d0", policy="always_local")
    world.client.script["p0"] = [UpstreamError("reset")]
    with pytest.raises(NoPrefillInstance):
        await world.ask(forced_path=Path.REMOTE_PREFILL)


async def test_the_number_of_waiting_requests_is_bounded():
    """One more than the limit is told to come back; those that stream already do not count."""
    world = World("d0", policy="always_local", waiting=2)
    world.client.script["d0"] = [0.05, 0.05]
    waiting = [asyncio.create_task(world.ask()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as refused:
        await world.ask()
    assert (refused.value.retry_after_s or 0) >= 1
    await asyncio.gather(*waiting)
    async with world.router.route(request(), BODY), world.router.route(request(), BODY):
        await world.ask()


async def test_c12_leases_end_each_at_its_own_time():
    """Prefill until it answers, handoff until the decode leg's first byte, decode until the end."""
    world = World("p0", "d0")
    world.client.script["p0"], world.client.script["d0"] = [0.02], [0.02]
    held = lambda: sorted(kind.value for kind, _ in world.loads.leases.held())  # noqa: E731
    states = []

    async def watch():
        while len(states) < 3:
            if held() not in states and held():
                states.append(held())
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    async with world.router.route(request(), BODY):
        await watching
    assert states == [["decode", "handoff", "prefill"], ["decode", "handoff"], ["decode"]]
    assert world.at_rest()


async def test_c12_whatever_happens_nothing_stays_held():
    """200 requests that succeed, fail, hang and are cancelled."""
    world = World()
    rng = random.Random(1)
    steps = [
        None,
        0.01,
        UpstreamError("x"),
        UpstreamUnreachable("x"),
        UpstreamRefused(400, "", b""),
        UpstreamTimeout("x"),
    ]
    for name in ("p0", "p1", "d0", "d1"):
        world.client.script[name] = [rng.choice(steps) for _ in range(200)]

    async def one():
        try:
            async with asyncio.timeout(rng.choice([0.005, 1])):
                await world.ask()
        except (UpstreamError, TimeoutError):
            pass

    await asyncio.gather(*(one() for _ in range(60)))
    for _ in range(140):
        await one()
    assert await world.router.drain(1)
    assert world.at_rest()


async def test_c23_draining_refuses_new_requests_and_waits_for_running_ones():
    """And says when they take too long."""
    world = World("d0", policy="always_local")
    async with world.router.route(request(), BODY):
        assert not await world.router.drain(0.01)
        with pytest.raises(Draining):
            await world.ask()
    assert await world.router.drain(0.01)


async def test_every_decision_is_told_also_one_that_comes_to_nothing():
    """A refusal names its targets too."""
    world, record = World("d0", policy="always_local"), RequestRecord("/v1/completions", "r1", 0.0)
    world.client.script["d0"] = [UpstreamRefused(400, "application/json", b"no")]
    with pytest.raises(UpstreamRefused):
        async with world.router.route(request(), BODY, record=record):
            pass
    assert record.decision is not None
    assert record.decision.decode == target("d0")


async def test_decide_sends_nothing():
    """What /debug/route shows."""
    world = World(policy="threshold", tokens=300)
    decision, admission = await world.router.decide(request(), BODY)
    assert (decision.path, decision.terms["uncached_tokens"]) == (Path.REMOTE_PREFILL, 300)
    assert isinstance(admission, Reserved)
    assert world.client.asked == []

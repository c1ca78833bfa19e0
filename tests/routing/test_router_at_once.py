"""Connectors whose two legs run at once: the decode leg needs nothing of the prefill's answer."""

from __future__ import annotations

import asyncio

from disagg_router.connectors.nixl import NixlConnector
from disagg_router.errors import (
    UpstreamError,
)
from disagg_router.model import HandoffResult, Path, Reason
from tests.builders import request
from tests.routing.router_world import BODY, LEASE_S, World


class AtOnce(NixlConnector):
    """A connector whose decode leg needs nothing of the prefill's answer."""

    concurrent_legs = True

    def decode_body(self, body, handoff):
        return {**body, "kv_transfer_params": {"do_remote_prefill": True, "transfer_id": handoff.request_id}}


def at_once(*names):
    return World(*names, connector=AtOnce(kv_load_failure_policy="recompute", lease_s=LEASE_S))


async def test_a_connector_may_need_both_legs_at_once():
    """The decode leg is sent while the prefill still computes, which then goes on beside it."""
    world = at_once("p0", "d0")
    world.client.script["p0"] = [0.05]
    async with world.router.route(request(), BODY) as routed:
        assert routed.decision.path is Path.REMOTE_PREFILL
        assert sorted(world.client.kinds()) == [("decode", "d0"), ("prefill", "p0")]
        assert not world.client.answered.is_set()
        await asyncio.wait_for(world.client.answered.wait(), 1)
    assert world.seen.handoffs == [HandoffResult.SENT]
    assert world.at_rest()


async def test_a_prefill_that_fails_ends_the_decode_leg_beside_it():
    """It would wait for ever. The request is served local."""
    world = at_once("p0", "d0")
    world.client.script["p0"], world.client.script["d0"] = [UpstreamError("died")], [60.0]
    decision, answer = await world.ask()
    assert (decision.path, decision.reason, answer) == (Path.LOCAL, Reason.NO_PREFILL, b'{"from": "d0"}')
    assert world.at_rest()


async def test_a_decode_leg_that_fails_ends_the_prefill_beside_it():
    """Nobody would fetch its KV."""
    world = at_once("p0", "d0", "d1")
    world.client.script["p0"] = [60.0, None]
    world.client.script["d0"] = world.client.script["d1"] = [UpstreamError("died")]
    decision, _ = await world.ask()
    assert decision.path is Path.REMOTE_PREFILL
    assert [kind for kind, _ in world.client.kinds()].count("decode") == 2
    assert world.at_rest()

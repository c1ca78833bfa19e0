"""GET /fleet and its long poll."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from disagg_router.controller.api import create_app
from disagg_router.controller.feed import FleetFeed
from disagg_router.model import Fingerprint, Instance, InstanceId, InstanceState, Role

ONE = Instance(
    id=InstanceId("decode-0"),
    role=Role.DECODE,
    url="http://127.0.0.1:21001",
    state=InstanceState.READY,
    incarnation="decode-0-b-1",
    engine_id="decode-0-b-1",
    fingerprint=Fingerprint(model="m", block_size=32),
    kv_events="tcp://127.0.0.1:21003",
    side_channel="127.0.0.1:21002",
)


@pytest.fixture
def feed() -> FleetFeed:
    return FleetFeed(first_version=7)


@pytest.fixture
async def client(feed: FleetFeed) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(feed, long_poll_s=0.2))
    async with httpx.AsyncClient(transport=transport, base_url="http://controller") as client:
        yield client


async def test_a_whole_snapshot(feed: FleetFeed, client: httpx.AsyncClient) -> None:
    """Without `after` the answer is immediate and complete."""
    feed.publish((ONE,))
    answer = (await client.get("/fleet")).json()
    assert answer["version"] == 8
    (instance,) = answer["instances"]
    assert set(instance) == {
        *("id", "role", "url", "state", "incarnation", "engine_id", "fingerprint", "kv_events", "side_channel")
    }
    assert (instance["role"], instance["state"], instance["fingerprint"]["block_size"]) == ("decode", "ready", 32)


@pytest.mark.parametrize("after", [6, 8, 2_000_000_000])
async def test_another_version_is_answered_at_once(client: httpx.AsyncClient, after: int) -> None:
    """Also a greater one: it is from a controller that is gone."""
    async with asyncio.timeout(0.1):
        assert (await client.get("/fleet", params={"after": after})).json()["version"] == 7


async def test_the_long_poll_ends_with_a_change(feed: FleetFeed, client: httpx.AsyncClient) -> None:
    """Whoever waits for the next version gets it when it is there."""
    waiting = asyncio.create_task(client.get("/fleet", params={"after": 7}))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    feed.publish((ONE,))
    assert (await waiting).json()["version"] == 8


async def test_the_long_poll_ends_by_itself(client: httpx.AsyncClient) -> None:
    """Nothing new is a plain answer with the old version."""
    assert (await client.get("/fleet", params={"after": 7})).json() == {"version": 7, "instances": []}


async def test_the_long_poll_ends_with_the_controller(feed: FleetFeed, client: httpx.AsyncClient) -> None:
    """A controller that stops keeps nobody waiting."""
    waiting = asyncio.create_task(client.get("/fleet", params={"after": 7}))
    await asyncio.sleep(0.02)
    feed.close()
    async with asyncio.timeout(0.1):
        assert (await waiting).status_code == 200


async def test_the_same_fleet_is_no_new_version(feed: FleetFeed) -> None:
    """Versions grow with changes only."""
    feed.publish((ONE,))
    feed.publish((ONE,))
    assert feed.snapshot.version == 8


async def test_health(client: httpx.AsyncClient) -> None:
    """Alive, whatever the instances do."""
    assert (await client.get("/health")).status_code == 200

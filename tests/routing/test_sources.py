"""Where the fleet comes from."""

from __future__ import annotations

import asyncio
import json

import pytest
import uvicorn
from fastapi import FastAPI, Response

from disagg_router.config import StaticInstance
from disagg_router.connectors.compatibility import fingerprint_from_args
from disagg_router.model import Fingerprint, Role
from disagg_router.routing.clock import MonotonicClock
from disagg_router.routing.sources import ControllerSource, FileSource, StaticSource
from tests.builders import FINGERPRINT


def describe(entry):
    if entry.args is None:
        return Fingerprint()
    if entry.args:
        fingerprint_from_args(entry.args, {}, model=None, revision=None, connector="nixl:pull")
    return FINGERPRINT


async def first(source, limit_s=5.0):
    async with asyncio.timeout(limit_s):
        return await anext(aiter(source.watch()))


async def test_a_static_list_is_the_fleet():
    """An instance without an id is named by its address; undeclared args mean an unknown fingerprint."""
    entries = [
        StaticInstance(url="http://a:8000/", role=Role.PREFILL, args={}),
        StaticInstance(url="http://b:8000", role=Role.DECODE, id="dec"),
    ]
    snapshot = await first(StaticSource(entries, describe))
    assert [(i.id, i.role, i.url) for i in snapshot.instances] == [
        ("a:8000", Role.PREFILL, "http://a:8000"),
        ("dec", Role.DECODE, "http://b:8000"),
    ]
    assert [i.fingerprint for i in snapshot.instances] == [FINGERPRINT, Fingerprint()]


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([("http://a:1", None), ("http://a:1", "x")], "two instances have the url http://a:1"),
        ([("http://a:1", "x"), ("http://b:1", "x")], "two instances have the id x"),
    ],
)
def test_an_instance_must_not_stand_twice(entries, says):
    """It would be counted twice and handed over to itself."""
    listed = [StaticInstance(url=url, role=Role.DECODE, id=id_) for url, id_ in entries]
    with pytest.raises(ValueError, match=says):
        StaticSource(listed, describe)


async def test_a_file_is_read_again_when_it_changes(tmp_path):
    """A half-written one keeps the last good fleet."""
    path = tmp_path / "fleet.yaml"
    path.write_text("instances: [{url: 'http://a:1', role: decode}]", encoding="utf-8")
    watch = FileSource(str(path), describe, _Hasty()).watch()
    async with asyncio.timeout(5):
        assert [i.id for i in (await anext(watch)).instances] == ["a:1"]
        path.write_text("instances: [{url: 'http://a:1', role", encoding="utf-8")
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        path.write_text("instances: [{url: 'http://a:1', role: decode, args: {block-size: [1]}}]", encoding="utf-8")
        await asyncio.sleep(0.05)
        assert not waiting.done()
        path.unlink()
        await asyncio.sleep(0.05)
        path.write_text("instances: [{url: 'http://b:1', role: decode}]", encoding="utf-8")
        snapshot = await waiting
        assert ([i.id for i in snapshot.instances], snapshot.version) == (["b:1"], 2)


class _Hasty(MonotonicClock):
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0.005)


def instance_json(name, state="ready"):
    return {"id": name, "role": "decode", "url": f"http://{name}:1", "state": state, "incarnation": "i"}


async def test_a_controller_is_polled_and_survived():
    """Whole snapshots by version; while it is away the last one stays, and a restarted one is believed again."""
    answers = [
        {"version": 7, "instances": [instance_json("a")]},
        {"version": 8, "instances": [instance_json("a"), instance_json("b")]},
        None,
        {"version": 3, "instances": [instance_json("c", state="starting")]},
    ]
    asked = []
    app = FastAPI()

    @app.get("/fleet")
    async def fleet(after: int | None = None):
        asked.append(after)
        if not answers:
            await asyncio.sleep(10)
        answer = answers.pop(0)
        return Response(json.dumps(answer) if answer else "x", 200 if answer else 500)

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=0))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    watch = ControllerSource(url, _Hasty()).watch()
    try:
        async with asyncio.timeout(5):
            seen = [await anext(watch) for _ in range(3)]
    finally:
        await watch.aclose()
        server.should_exit = True
        server.force_exit = True
        await serving
    assert [[i.id for i in snapshot.instances] for snapshot in seen] == [["a"], ["a", "b"], ["c"]]
    assert asked[:4] == [None, 7, 8, None]
    assert seen[2].instances[0].state.value == "starting"


class _Counting(MonotonicClock):
    """Never waits, and gives up after so many sleeps."""

    def __init__(self, sleeps: int) -> None:
        self.left, self.longest_s = sleeps, 0.0

    async def sleep(self, seconds: float) -> None:
        self.left, self.longest_s = self.left - 1, max(self.longest_s, seconds)
        if self.left < 0:
            raise TimeoutError


async def test_a_controller_that_is_away_for_long_is_waited_for():
    """A day and longer; the last fleet stays in force meanwhile."""
    clock = _Counting(1200)
    with pytest.raises(TimeoutError):
        await first(ControllerSource("http://127.0.0.1:9", clock), 60)
    assert 2.0 < clock.longest_s < 10.0

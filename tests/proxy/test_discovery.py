"""A router whose fleet is Kubernetes': who gets no request any more, and what becomes of the streams there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine, Script
from tests.fakes.kubernetes import PODS, FakeKubernetes, endpoint, endpoint_slice, pod, serving
from tests.proxy.service import Service, fakes, running

TOKENS = 60
LABELS = {"a": "app=vllm,pod=a", "b": "app=vllm,pod=b"}


def fleet(api: FakeKubernetes, a: FakeEngine, b: FakeEngine) -> dict[str, Any]:
    """One entry per pod, since all engines of a test share an address and differ in their ports."""
    pods = [
        {"selector": f"app=vllm,pod={name}", "port": engine.port, "role": "decode", "args": {}}
        for name, engine in (("a", a), ("b", b))
    ]
    return {"kubernetes": {"namespace": "ai", "api": api.url, "resync_s": 1, "pods": pods}}


def put(api: FakeKubernetes, name: str, **changes: Any) -> None:
    api.put(pod(name, **{"ip": "127.0.0.1", "labels": LABELS[name], **changes}))


def ready(service: Service) -> list[str]:
    return sorted(one.id for one in service.parts.brain.fleet.ready())


async def stream(service: Service, started: asyncio.Event) -> list[str]:
    """The data lines of one long answer."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": TOKENS, "stream": True}
    lines = []
    async with service.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["x-disagg-decode"] == "b"
        async for line in answer.aiter_lines():
            if line:
                lines.append(line)
                started.set()
    return lines


CHANGES = {
    "a delete that was missed": lambda api: api.delete(PODS, "b", told=False),
    "a delete": lambda api: api.delete(PODS, "b"),
    "another label": lambda api: put(api, "b", labels="app=web,pod=b"),
    "not ready": lambda api: put(api, "b", ready=False),
    "terminating": lambda api: put(api, "b", terminating=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_c01_who_leaves_gets_no_request_and_ends_what_it_has(change):
    """Although its engine still answers: twenty requests go to the other pod, and the stream there comes whole."""
    api = FakeKubernetes()
    async with serving(api), fakes("a", "b") as (a, b), running(settled=False, fleet=fleet(api, a, b)) as service:
        put(api, "b")
        await service.until(lambda _: ready(service) == ["b"])
        b.script(Script(on="/v1/completions", event_delay_s=0.075))
        started = asyncio.Event()
        running_stream = asyncio.create_task(stream(service, started))
        await started.wait()
        put(api, "a")
        await service.until(lambda _: ready(service) == ["a", "b"])
        change(api)
        await service.until(lambda _: ready(service) == ["a"])
        sent = len(b.generations())
        answers = await asyncio.gather(*(service.complete(f"hello {i}") for i in range(20)))
        assert {(one.status_code, one.headers["x-disagg-decode"]) for one in answers} == {(200, "a")}
        assert not running_stream.done()
        lines = await running_stream
        assert len(b.generations()) == sent
        assert lines[-1] == "data: [DONE]"
        assert sum(bool(json.loads(line[6:])["choices"][0]["text"]) for line in lines[:-1]) == TOKENS


async def test_a_pod_that_serves_another_model():
    """Ready and matching, but its engine does not list the model: no request goes there."""
    api, other = FakeKubernetes(), FakeEngine(engine_id="b", served_name="other")
    async with serving(api), other, fakes("a") as (a,), running(settled=False, fleet=fleet(api, a, other)) as service:
        put(api, "a")
        put(api, "b")
        await service.until(lambda fleet: len(fleet.instances) == 2 and ready(service) == ["a"])
        answers = [await service.complete(f"hello {i}") for i in range(10)]
        assert {(one.status_code, one.headers["x-disagg-decode"]) for one in answers} == {(200, "a")}
        assert other.generations() == []


async def test_prefill_and_decode_pods_behind_services():
    """They are tested as pairs and split a prompt, as any other fleet does."""
    api = FakeKubernetes()
    services = [
        {"name": role, "port": "http", "role": role, "args": {"block-size": 32}} for role in ("prefill", "decode")
    ]
    async with serving(api), fakes("p", "d") as (p, d):
        for name, engine in (("prefill", p), ("decode", d)):
            one = endpoint(f"{name}-x", "127.0.0.1", ready=True)
            api.put(endpoint_slice(f"{name}-1", name, one, port=engine.port))
        config = {"kubernetes": {"namespace": "ai", "api": api.url, "services": services}}
        async with running(settled=False, fleet=config) as service:
            await service.until(lambda fleet: len(fleet.tested_pairs()) == 1)
            answer = await service.complete("x" * 300, headers={"x-disagg-path": "remote_prefill"})
            used = [answer.headers[f"x-disagg-{what}"] for what in ("path", "prefill", "decode")]
            assert used == ["remote_prefill", "prefill-x", "decode-x"]

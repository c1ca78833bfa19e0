"""VllmClient against a scripted engine: good answers, and every kind of bad one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from disagg_router.engines.client import VllmClient
from disagg_router.engines.connection import UpstreamLimits
from disagg_router.errors import UpstreamError, UpstreamRefused, UpstreamTimeout, UpstreamUnreachable
from disagg_router.interfaces import EngineCall
from disagg_router.model import Fingerprint
from tests.fakes.engine import FakeEngine, Script

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def call(**fields: object) -> EngineCall:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "stream": True, **fields}
    return EngineCall("/v1/completions", json.dumps(body).encode(), head_limit_s=0.5)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(model="/models/tiny") as engine:
        yield engine


@pytest.fixture
async def client() -> AsyncIterator[VllmClient]:
    client = VllmClient(
        UpstreamLimits(connect_s=1, first_byte_s=1, idle_s=1), tokenize_s=0.3, health_s=0.2, control_s=0.3
    )
    yield client
    await client.close()


async def answer(client: VllmClient, engine: FakeEngine, request: EngineCall) -> bytes:
    async with client.open(engine.url, request) as response:
        return await response.read()


async def test_a_stream_is_whole_though_its_start_was_looked_at(client: VllmClient, engine: FakeEngine) -> None:
    """Every event is handed on, the first one included."""
    events = (await answer(client, engine, call())).split(b"\n\n")
    assert [event[:7] for event in events] == [b"data: {"] * 4 + [b"data: [", b""]


async def test_open_waits_for_the_first_event_of_a_stream(client: VllmClient, engine: FakeEngine) -> None:
    """A head of 200 says nothing: vLLM sends it before it has computed anything. The first event is limited too."""
    engine.script(Script(event_delay_s=0.8))
    with pytest.raises(UpstreamTimeout):
        await answer(client, engine, call())


async def test_the_first_event_may_come_in_pieces(client: VllmClient, engine: FakeEngine) -> None:
    """Comments are passed over, and an event is one only when its end is there."""
    pieces = (SSE, chunk(b": hello\n\n"), chunk(b"data: "), chunk(b'{"choices":[]}\n'), chunk(b"\n"), chunk(b""))
    engine.script(Script(raw=pieces))
    assert await answer(client, engine, call()) == b': hello\n\ndata: {"choices":[]}\n\n'


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (Script(status=500), UpstreamError, "answered 500"),
        (Script(status=307), UpstreamError, "answered 307"),
        (Script(error_first=500), UpstreamError, "failed: Internal server error"),
        (Script(cut_after=0), UpstreamError, "before the end"),
        (Script(raw=(SSE, chunk(b""))), UpstreamError, "before its first event"),
        (Script(hang=True), UpstreamTimeout, "sent nothing"),
        (Script(reset=True), UpstreamError, "closed"),
    ],
    ids=["500", "redirect", "error event", "cut", "empty stream", "silent", "reset"],
)
async def test_an_engine_that_fails(
    client: VllmClient, engine: FakeEngine, script: Script, error: type[UpstreamError], message: str
) -> None:
    """Known before the first byte goes to anybody, and never a refusal."""
    engine.script(script)
    with pytest.raises(error, match=message) as raised:
        await answer(client, engine, call())
    assert not isinstance(raised.value, (UpstreamRefused, UpstreamUnreachable))


async def test_a_refusal_carries_the_engines_own_words(client: VllmClient, engine: FakeEngine) -> None:
    """Status, type and body of a 4xx; the connection stays good."""
    for _ in range(2):
        with pytest.raises(UpstreamRefused) as refused:
            await answer(client, engine, call(max_tokens=0))
        assert (refused.value.status, refused.value.content_type) == (400, "application/json")
        assert json.loads(refused.value.body)["error"]["param"] == "max_tokens"
    assert engine.connections == 1


async def test_a_refusal_may_come_as_the_first_event(client: VllmClient, engine: FakeEngine) -> None:
    """200 has gone out by then, the code is in the event."""
    engine.script(Script(error_first=400))
    with pytest.raises(UpstreamRefused) as refused:
        await answer(client, engine, call())
    assert refused.value.status == 400
    assert json.loads(refused.value.body)["error"]["message"]


async def test_counts_tokens_as_the_engine_does(client: VllmClient, engine: FakeEngine) -> None:
    """The count equals the usage of the generation; ids need no engine at all."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    generation = EngineCall("/v1/chat/completions", json.dumps({**chat, "max_tokens": 1}).encode())
    usage = json.loads(await answer(client, engine, generation))["usage"]
    assert len(await client.tokenize(engine.url, chat)) == usage["prompt_tokens"]
    assert sorted(await client.tokenize(engine.url, {"prompt": ["ab", [1, 2, 3]]})) == [1, 2, 3, 100, 101]
    assert await client.tokenize("http://127.0.0.1:1", {"prompt": [1, 2, 3]}) == [1, 2, 3]


async def test_tokenizing_fails_as_the_generation_would(client: VllmClient, engine: FakeEngine) -> None:
    """A refusal is the client's, anything else the engine's."""
    with pytest.raises(UpstreamRefused) as refused:
        await client.tokenize(engine.url, {"model": "other", "prompt": "a"})
    assert refused.value.status == 404
    not_json = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno"
    for script in (Script(on="/tokenize", status=503), Script(on="/tokenize", raw=(not_json,))):
        engine.script(script)
        with pytest.raises(UpstreamError):
            await client.tokenize(engine.url, {"prompt": "a"})
    engine.script(Script(on="/tokenize", hang=True))
    with pytest.raises(UpstreamTimeout):
        await client.tokenize(engine.url, {"prompt": "a"})


async def test_health(client: VllmClient, engine: FakeEngine) -> None:
    """Well, unwell and gone are answers; silence is not one."""
    assert await client.healthy(engine.url)
    engine.healthy = False
    assert not await client.healthy(engine.url)
    engine.script(Script(on="/health", hang=True))
    with pytest.raises(UpstreamTimeout):
        await client.healthy(engine.url)
    await engine.die()
    assert not await client.healthy(engine.url)


async def test_a_report_holds_what_the_engine_tells(client: VllmClient, engine: FakeEngine) -> None:
    """What it does not tell stays None; another start is another incarnation."""
    report = await client.report(engine.url)
    expected = Fingerprint(model="/models/tiny", vllm_version="0.32.0", kv_dtype="auto", block_size=32)
    assert report.fingerprint == expected
    assert (report.served_models, report.model_cards[0]["max_model_len"]) == (("tiny",), 8192)
    assert report.model_cards[0]["owned_by"] == "vllm"
    assert report.kv_capacity_tokens == 32_000  # 1,000 blocks
    engine.started_s += 20
    assert (await client.report(engine.url)).incarnation != report.incarnation


@pytest.mark.parametrize(
    ("path", "script"),
    [
        ("/version", Script(on="/version", status=500)),
        (
            "/v1/models",
            Script(on="/v1/models", raw=(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n[]",)),
        ),
        ("/metrics", Script(on="/metrics", hang=True)),
        ("/metrics", Script(on="/metrics", reset=True)),
    ],
)
async def test_a_report_that_cannot_be_had(client: VllmClient, engine: FakeEngine, path: str, script: Script) -> None:
    """Every failure of the HTTP library or the answer is an UpstreamError."""
    engine.script(script)
    with pytest.raises(UpstreamError, match=path):
        await client.report(engine.url)


async def test_counters(client: VllmClient, engine: FakeEngine) -> None:
    """Named without the labels that tell engines apart."""
    engine.pulled_tokens = 7
    counters = await client.counters(engine.url)
    assert counters['vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'] == 7

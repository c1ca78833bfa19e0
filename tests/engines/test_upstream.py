"""The hot path against a scripted engine: reuse, resending, limits, hanging up, back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from disagg_router.engines.connection import UpstreamLimits
from disagg_router.engines.upstream import Upstream
from disagg_router.errors import UpstreamError, UpstreamTimeout, UpstreamUnreachable
from disagg_router.interfaces import EngineCall, EngineResponse
from tests.fakes.engine import FakeEngine, Script

PATH = "/v1/completions"


def call(*, once: bool = False, head_limit_s: float | None = None, **fields: object) -> EngineCall:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 8, **fields}
    return EngineCall(PATH, json.dumps(body).encode(), (("x-request-id", "r1"),), once=once, head_limit_s=head_limit_s)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream(UpstreamLimits(connect_s=1, first_byte_s=2, idle_s=0.3))
    yield upstream
    await upstream.close()


async def post(upstream: Upstream, engine: FakeEngine, request: EngineCall | None = None) -> bytes:
    async with upstream.open(engine.url, request or call()) as response:
        return await response.read()


async def collect(response: EngineResponse, into: list[bytes]) -> None:
    async for chunk in response.chunks():
        into.append(chunk)


async def test_one_connection_serves_requests_in_a_row(engine: FakeEngine, upstream: Upstream) -> None:
    """Streamed or not, an answer read to its end gives its connection back; headers arrive as they were given."""
    for stream in (False, True, False, True):
        assert await post(upstream, engine, call(stream=stream))
    assert engine.connections == 1
    assert engine.requests[0].headers["x-request-id"] == "r1"
    assert engine.requests[0].headers["content-type"] == "application/json"


async def test_the_last_connection_used_is_used_first(engine: FakeEngine, upstream: Upstream) -> None:
    """Of several idle connections one carries a sequence of requests, so that the others can go."""
    async with AsyncExitStack() as stack:
        for _ in range(3):
            response = await stack.enter_async_context(upstream.open(engine.url, call()))
            await response.read()
    for _ in range(3):
        await post(upstream, engine)
    assert engine.connections == 3
    assert len({request.connection for request in engine.requests[3:]}) == 1


async def test_idle_connections_are_closed_before_the_engine_does(engine: FakeEngine) -> None:
    """After keep_alive_s there is nothing left to be used."""
    upstream = Upstream(UpstreamLimits(keep_alive_s=0.05))
    await post(upstream, engine)
    await asyncio.sleep(0.15)
    await post(upstream, engine)
    assert engine.connections == 2
    await upstream.close()


async def test_no_more_connections_than_allowed(engine: FakeEngine) -> None:
    """Beyond the bound a request fails at once, as one that no engine has seen."""
    upstream = Upstream(UpstreamLimits(connections=1))
    async with upstream.open(engine.url, call()):
        with pytest.raises(UpstreamUnreachable, match="in use"):
            await post(upstream, engine)
    await upstream.close()


class ImpatientEngine:
    """Lives in a thread: answers one request per connection and closes it a moment later, however busy our loop is."""

    def __init__(self) -> None:
        self.requests = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> ImpatientEngine:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                with connection:
                    if connection.recv(65_536):
                        self.requests += 1
                        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                        time.sleep(0.05)


async def test_resends_only_what_the_engine_never_saw(upstream: Upstream) -> None:
    """The idle connection was closed behind our back: the request goes out again, unless it may go only once."""
    with ImpatientEngine() as engine:
        for expected, once in ((1, False), (2, False), (2, True)):
            if once:
                with pytest.raises(UpstreamError):
                    async with upstream.open(engine.url, call(once=True)):
                        pass
            else:
                async with upstream.open(engine.url, call()) as response:
                    assert await response.read() == b"ok"
            assert engine.requests == expected
            time.sleep(0.2)  # noqa: ASYNC251 - the loop must not see the close


async def test_never_resends_what_the_engine_took(engine: FakeEngine, upstream: Upstream) -> None:
    """A reused connection that is closed with the request in the engine's hands is an error, not a second request."""
    await post(upstream, engine)
    engine.script(Script(close=True))
    with pytest.raises(UpstreamError):
        await post(upstream, engine)
    assert (len(engine.requests), engine.connections) == (2, 1)


async def test_never_resends_on_a_fresh_connection(engine: FakeEngine, upstream: Upstream) -> None:
    """A first request that is reset is an error: no keep-alive limit explains it."""
    engine.script(Script(reset=True))
    with pytest.raises(UpstreamError):
        await post(upstream, engine)
    assert len(engine.requests) == 1


async def test_no_request_is_lost_or_doubled_at_the_edge_of_keep_alive(engine: FakeEngine, upstream: Upstream) -> None:
    """Requests timed around the engine's own idle limit all get their answer, each from one request."""
    engine.idle_close_s = 0.01
    rng = random.Random(1)
    for _ in range(100):
        assert await post(upstream, engine)
        await asyncio.sleep(rng.uniform(0.008, 0.012))
    assert len(engine.requests) == 100


async def test_a_request_to_be_sent_once_avoids_old_connections(engine: FakeEngine) -> None:
    """What has been idle for a while may be about to be closed; a fresh one is made instead."""
    upstream = Upstream(UpstreamLimits(keep_alive_s=0.4))
    await post(upstream, engine)
    await asyncio.sleep(0.15)
    await post(upstream, engine, call(once=True))
    assert engine.connections == 2
    await post(upstream, engine, call(once=True))
    assert engine.connections == 2
    await upstream.close()


async def test_an_unreachable_engine_is_told_apart(engine: FakeEngine, upstream: Upstream) -> None:
    """Nothing listens there: the request was never sent."""
    await engine.die()
    with pytest.raises(UpstreamUnreachable, match="did not accept"):
        await post(upstream, engine)


async def test_connecting_is_limited() -> None:
    """A host that does not take the connection in time is unreachable too."""
    upstream = Upstream(UpstreamLimits(connect_s=0.1))
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        with pytest.raises(UpstreamUnreachable, match="within"):
            async with upstream.open(url, call()):
                pass
        for filler in fillers:
            filler.close()
    await upstream.close()


async def test_a_silent_engine_runs_into_the_first_byte_limit(engine: FakeEngine, upstream: Upstream) -> None:
    """The call's own limit goes before the client's, and the engine sees the hang-up."""
    engine.script(Script(hang=True))
    with pytest.raises(UpstreamTimeout):
        await post(upstream, engine, call(head_limit_s=0.1))
    await asyncio.wait_for(engine.requests[0].gone.wait(), 1)


async def test_a_stalled_stream_runs_into_the_idle_limit(engine: FakeEngine, upstream: Upstream) -> None:
    """The limit is between bytes; the whole may take as long as it likes."""
    engine.script(Script(event_delay_s=0.1), Script(event_delay_s=0.6))
    started_s = time.monotonic()
    assert b"[DONE]" in await post(upstream, engine, call(stream=True))
    assert time.monotonic() - started_s > 0.5
    with pytest.raises(UpstreamTimeout):
        await post(upstream, engine, call(stream=True))


async def test_leaving_early_hangs_up_on_the_engine(engine: FakeEngine, upstream: Upstream) -> None:
    """However the context is left, the engine learns within a second that nobody listens."""
    engine.script(*[Script(event_delay_s=0.05)] * 3)

    async def leave_by(how: str) -> None:
        async with upstream.open(engine.url, call(stream=True, max_tokens=1000)) as response:
            async for _ in response.chunks():
                if how == "raise":
                    raise ValueError
                if how == "break":
                    break

    await leave_by("break")
    with pytest.raises(ValueError):  # noqa: PT011 - the very one raised above
        await leave_by("raise")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(leave_by("cancel"), 0.2)
    for request in engine.requests:
        await asyncio.wait_for(request.gone.wait(), 1)


async def test_leaving_while_the_head_is_awaited_hangs_up(engine: FakeEngine, upstream: Upstream) -> None:
    """A request cancelled before its answer began is aborted too."""
    engine.script(Script(hang=True))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(post(upstream, engine), 0.1)
    await asyncio.wait_for(engine.requests[0].gone.wait(), 1)


async def test_a_stream_cut_short_raises(engine: FakeEngine, upstream: Upstream) -> None:
    """What came before the loss is handed on; the end is an error."""
    engine.script(Script(cut_after=3))
    got: list[bytes] = []
    with pytest.raises(UpstreamError):
        async with upstream.open(engine.url, call(stream=True)) as response:
            await collect(response, got)
    assert b"".join(got).count(b"data: ") == 3


async def test_an_unread_answer_fills_bounded_memory(engine: FakeEngine, upstream: Upstream) -> None:
    """A consumer that does not take leaves the rest of 32 MiB with the engine, and loses none of it."""
    piece = b"a" * 1024 * 1024
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (32 * len(piece))
    engine.script(Script(raw=(head, *[piece] * 32)))
    tracemalloc.start()
    try:
        async with upstream.open(engine.url, call()) as response:
            await asyncio.sleep(0.5)
            held_bytes, _ = tracemalloc.get_traced_memory()
            received_bytes = sum([len(chunk) async for chunk in response.chunks()])
    finally:
        tracemalloc.stop()
    assert received_bytes == 32 * len(piece)
    assert held_bytes < 3 * len(piece)


async def test_closing_cuts_what_is_in_flight(engine: FakeEngine, upstream: Upstream) -> None:
    """After close nothing is open and nothing can be opened."""
    engine.script(Script(hang=True))
    pending = asyncio.ensure_future(post(upstream, engine))
    await asyncio.sleep(0.1)
    await upstream.close()
    with pytest.raises(UpstreamError):
        await pending
    with pytest.raises(UpstreamError, match="shutting down"):
        await post(upstream, engine)


async def test_a_header_with_a_line_break_is_not_sent(engine: FakeEngine, upstream: Upstream) -> None:
    """Nothing a client sends can become a header of its own."""
    request = EngineCall(PATH, b"{}", (("x-request-id", "a\r\nx-data-parallel-rank: 1"),))
    with pytest.raises(UpstreamError, match="line break"):
        await post(upstream, engine, request)
    assert not engine.requests


async def test_https_is_verified(engine: FakeEngine, upstream: Upstream) -> None:
    """A server that does not speak TLS is unreachable over https."""
    with pytest.raises(UpstreamUnreachable):
        async with upstream.open(engine.url.replace("http:", "https:"), call()):
            pass

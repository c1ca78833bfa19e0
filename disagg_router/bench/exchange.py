"""One HTTP/1.1 POST and its event stream, timed as the client sees it; little CPU, since engines share the cores."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools
import msgspec

CONNECT_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request. Times are on one clock, in seconds; `event_s` are the arrivals of tokens.

    `complete`: 200, as many tokens as were asked for by the server's own count, and a stream that ended properly.
    """

    sent_s: float
    ended_s: float
    status: int | None  # None: no answer, or none before it was given up
    event_s: tuple[float, ...]
    complete: bool
    given_up: bool = False  # by us, at the end of the measurement

    @property
    def refused(self) -> bool:
        """By the router's own word: there is no room."""
        return self.status in (429, 503)

    @property
    def failed(self) -> bool:
        return not (self.complete or self.refused or self.given_up)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to send, and by what clock to time."""

    host: str
    port: int
    now_s: Callable[[], float]


class Client:
    """Requests one after another over one connection, opened anew where the server closed it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._connection: _Connection | None = None

    async def post(self, path: str, body: bytes, wanted_tokens: int, headers: tuple[str, ...] = ()) -> Outcome:
        """Never raises for what a server may do. Cancelled, it closes the connection."""
        sent_s = self._endpoint.now_s()
        try:
            connection = await self._connected()
        except (OSError, TimeoutError):
            return Outcome(sent_s, self._endpoint.now_s(), None, (), False)
        head = f"POST {path} HTTP/1.1\r\nhost: {self._endpoint.host}:{self._endpoint.port}\r\n"
        fields = "".join(f"{line}\r\n" for line in headers)
        rest = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{fields}\r\n"
        try:
            await connection.exchange((head + rest).encode() + body)
        except asyncio.CancelledError:
            connection.close()
            raise
        return self._outcome(connection, sent_s, wanted_tokens)

    def given_up(self, sent_s: float) -> Outcome:
        """The request that runs now, as far as it came."""
        seen_s = self._connection.event_s if self._connection else ()
        events = tuple(at_s for at_s in seen_s if at_s >= sent_s)  # not those of the request before
        return Outcome(sent_s, self._endpoint.now_s(), None, events, complete=False, given_up=True)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _connected(self) -> _Connection:
        if self._connection is None or not self._connection.usable:
            now_s = self._endpoint.now_s
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(CONNECT_LIMIT_S):
                made = loop.create_connection(lambda: _Connection(now_s), self._endpoint.host, self._endpoint.port)
                self._connection = (await made)[1]
        return self._connection

    def _outcome(self, connection: _Connection, sent_s: float, wanted_tokens: int) -> Outcome:
        complete = connection.status == 200 and connection.done and connection.tokens == wanted_tokens
        status = connection.status or None
        return Outcome(sent_s, self._endpoint.now_s(), status, tuple(connection.event_s), complete)


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    """What of a completions event is looked at; msgspec skips the rest."""

    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Connection(asyncio.Protocol):
    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._decoder = msgspec.json.Decoder(_Event)
        self._ended: asyncio.Future[None] | None = None
        self._lost = False
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._tail = b""
        self.status = 0
        self.event_s: list[float] = []
        self.tokens = 0
        self.done = False  # [DONE] came

    @property
    def usable(self) -> bool:
        return not self._lost and not self._transport.is_closing()

    async def exchange(self, request: bytes) -> None:
        """Until the answer is complete or the connection is lost."""
        self._reset()
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended

    def close(self) -> None:
        self._transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._end()

    # --- httptools ---

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status != 200:
            return
        now_s = self._now_s()
        *events, self._tail = (self._tail + body).split(b"\n\n")
        for event in events:
            self._event(event, now_s)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self._transport.close()
        self._end()

    def _event(self, event: bytes, now_s: float) -> None:
        """vLLM sends a completions event with a choice for each step that made tokens. Its text may be empty, where
        the last byte is half a character: it is a token all the same."""
        if event == b"data: [DONE]":
            self.done = True
            return
        try:
            told = self._decoder.decode(event.removeprefix(b"data: "))
        except msgspec.MsgspecError:
            return
        if told.choices:
            self.event_s.append(now_s)
        if told.usage is not None:
            self.tokens = told.usage.completion_tokens

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


async def fetch(host: str, port: int, path: str, limit_s: float = 5.0) -> bytes | None:
    """The body of a GET that was answered with 200 and a length; None for anything else."""
    request = f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode()
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = re.search(rb"\r\ncontent-length: *(\d+)", head)
                if length is None or head.split(b" ", 2)[1] != b"200":
                    return None
                return await reader.readexactly(int(length[1]))
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return None

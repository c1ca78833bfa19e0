"""One HTTP/1.1 connection to an engine: bytes out, one parsed answer back, one exchange at a time."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import cast

import httptools

from disagg_router.errors import UpstreamError, UpstreamTimeout

# Read-ahead of one answer before the socket is left alone; one read (at most 256 KiB) may come on top.
_HIGH_WATER_BYTES = 256 * 1024
# struct tcp_info: where tcpi_bytes_acked stands, and enough room for it.
_TCP_INFO_BYTES = 192
_BYTES_ACKED_OFFSET = 120


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Seconds, bytes and counts. There is no limit on the whole of an answer: streams are as long as they are.

    `first_byte_s` covers the head and, of an event stream, the first event too: vLLM sends the head of a stream before
    it has computed anything. `idle_s` is the longest gap after that. `keep_alive_s` must stay below the engine's own
    (uvicorn: 5), so that it is we who close an idle connection.
    """

    connect_s: float = 5
    first_byte_s: float = 120
    idle_s: float = 60
    keep_alive_s: float = 4
    head_bytes: int = 64 * 1024
    idle_connections: int = 256  # per origin
    connections: int = 8192  # per origin, in use and idle


class _State(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    COMPLETE = auto()
    LOST = auto()


class Connection(asyncio.Protocol):
    """Sends a request, parses the answer, holds body bytes until they are taken.

    Back-pressure: above the high-water mark nothing is read from the socket until the consumer takes what is there.
    """

    def __init__(self, limits: UpstreamLimits, on_lost: Callable[[Connection], None]) -> None:
        self._limits = limits
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._state = _State.IDLE
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._acked_before: int | None = None
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._error: UpstreamError | None = None
        self._silent = True  # no byte of an answer yet
        self._unseen = False
        self._head_bytes = 0
        self._until_close = False
        self._keep_alive = False
        self._parts: list[bytes] = []
        self._buffered_bytes = 0
        self._paused = False

    # --- the consumer's side ----------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether another request may be sent on it."""
        return self._state is _State.IDLE and not self._transport.is_closing()

    @property
    def unseen(self) -> bool:
        """True when the connection ended and the engine is known never to have read the request."""
        return self._unseen

    async def send(self, request: bytes, limit_s: float) -> None:
        """Write a whole request at once and wait until the answer's status and headers are known."""
        self._reset()
        self._state = _State.HEAD
        self._acked_before = _acked_bytes(self._transport)
        self._transport.write(request)
        await self._wait(limit_s)
        if self._error is not None:
            raise self._error

    async def take(self, limit_s: float) -> bytes:
        """All body bytes that have arrived; waits for some; b"" at the end of the body."""
        if not self._parts and self._state is _State.BODY:
            await self._wait(limit_s)
        if self._parts:
            return self._drain()
        if self._error is not None:
            raise self._error
        return b""

    def finish(self) -> bool:
        """End the exchange. True when the connection can serve another; otherwise it is aborted, which the engine
        sees as its client hanging up."""
        if self._state is _State.COMPLETE and self._keep_alive and not self._transport.get_write_buffer_size():
            self._drain()
            self._state = _State.IDLE
            return self.usable
        self.abort()
        return False

    def abort(self) -> None:
        self._fail(UpstreamError("the connection to the engine was given up"))

    def _drain(self) -> bytes:
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self._buffered_bytes = 0
        if self._paused:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()
        return data

    async def _wait(self, limit_s: float) -> None:
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(limit_s, self._late, limit_s)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _late(self, limit_s: float) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._fail(UpstreamTimeout(f"the engine sent nothing for {limit_s:g} s"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: UpstreamError) -> None:
        if self._state in (_State.HEAD, _State.BODY):
            self._error = error
        self._state = _State.LOST
        self._transport.abort()
        self._wake()

    # --- asyncio.Protocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # what create_connection hands out
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self._state not in (_State.HEAD, _State.BODY):
            self.abort()  # nobody asked for this
            return
        self._silent = False
        if self._state is _State.HEAD:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            error = UpstreamError("the engine's answer is not HTTP/1.1")
            error.__cause__ = exc
            self._fail(error)
            return
        if self._state is _State.HEAD and self._head_bytes > self._limits.head_bytes:
            self._fail(UpstreamError(f"the head of the engine's answer exceeds {self._limits.head_bytes} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._state is _State.BODY and self._until_close and exc is None:
            self._keep_alive = False
            self._state = _State.COMPLETE
        elif self._state in (_State.HEAD, _State.BODY):
            self._unseen = self._silent and self._left_unread(exc)
            error = UpstreamError("the engine closed the connection before the end of its answer")
            error.__cause__ = exc
            self._error = error
            self._state = _State.LOST
        elif self._state is _State.IDLE:
            self._state = _State.LOST
        self._wake()
        self._on_lost(self)

    def _left_unread(self, exc: Exception | None) -> bool:
        """Whether the way the connection ended says that the engine had not read the request.

        A socket closed with unread bytes resets its peer, one closed after reading does not. One closed before the
        request arrived has acknowledged none of it, and its closing segment says so.
        """
        if exc is not None:
            return isinstance(exc, (ConnectionResetError, BrokenPipeError))
        return self._acked_before is not None and _acked_bytes(self._transport) == self._acked_before

    # --- httptools callbacks ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.headers = {}
        if self._state is _State.COMPLETE:
            self._keep_alive = False  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._state is not _State.HEAD:  # 1xx: the answer itself is still to come
            return
        self.status = status
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers or status in (204, 304)
        self._until_close = not framed
        self._state = _State.BODY
        self._wake()

    def on_body(self, data: bytes) -> None:
        if self._state is not _State.BODY:
            return
        self._parts.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > _HIGH_WATER_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self._state is not _State.BODY:
            return
        self._keep_alive = self._parser.should_keep_alive()
        self._state = _State.COMPLETE
        self._wake()


def _acked_bytes(transport: asyncio.Transport) -> int | None:
    """Bytes the peer's kernel has acknowledged on this connection; None where the system does not tell."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO_BYTES)
        return int(struct.unpack_from("=Q", info, _BYTES_ACKED_OFFSET)[0])
    except (OSError, struct.error):
        return None

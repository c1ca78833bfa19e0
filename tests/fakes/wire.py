"""The fake engine's side of one HTTP/1.1 connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.fakes.shapes import Json

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error", 503: "Service Unavailable"}


@dataclass(slots=True)
class Recorded:
    """One request as it came in. `gone` is set when its client left before the answer was complete."""

    path: str
    headers: dict[str, str]
    content: bytes
    connection: int
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> Json:
        return json.loads(self.content)


class IdleProtocol(asyncio.StreamReaderProtocol):
    """A stream that closes itself when idle, as uvicorn does: bytes that were read are never thrown away."""

    def __init__(self, connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]) -> None:
        super().__init__(asyncio.StreamReader(), connected)
        self._closing: asyncio.TimerHandle | None = None

    def close_after(self, idle_s: float, transport: asyncio.BaseTransport) -> None:
        self._closing = asyncio.get_running_loop().call_later(idle_s, transport.close)

    def data_received(self, data: bytes) -> None:
        if self._closing is not None:
            self._closing.cancel()
        super().data_received(data)


class Wire:
    """One connection's bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def request(self, connection: int, idle_close_s: float | None) -> Recorded | None:
        """The next request; None when the client is done, or idle for too long."""
        protocol = self._writer.transport.get_protocol()
        if idle_close_s is not None and isinstance(protocol, IdleProtocol):
            protocol.close_after(idle_close_s, self._writer.transport)
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            fields = (line.partition(":") for line in lines[1:] if line)
            headers = {name.lower(): value.strip() for name, _, value in fields}
            content = await self._reader.readexactly(int(headers.get("content-length", "0")))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return Recorded(lines[0].split(" ")[1], headers, content, connection)

    async def watched(self, serving: Awaitable[bool], gone: asyncio.Event) -> bool:
        """`serving`'s result, or False as soon as the client hangs up."""
        served = asyncio.ensure_future(serving)
        hung_up = asyncio.ensure_future(self._reader.read(1))
        try:
            await asyncio.wait({served, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            if served.done():
                with contextlib.suppress(ConnectionError):
                    return served.result()
            gone.set()
            return False
        finally:
            served.cancel()
            hung_up.cancel()
            await asyncio.gather(served, hung_up, return_exceptions=True)

    async def head(self, status: int, *lines: str) -> None:
        first = f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}"
        date = "date: Sun, 29 Nov 2026 18:20:30 GMT"
        await self.write("\r\n".join([first, date, "server: uvicorn", *lines, "vary: Origin", "", ""]).encode())

    async def body(self, status: int, content_type: str, content: bytes) -> None:
        await self.head(status, f"content-length: {len(content)}", f"content-type: {content_type}")
        await self.write(content)

    async def json(self, status: int, value: Json) -> None:
        await self.body(status, "application/json", json.dumps(value, separators=(",", ":")).encode())

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def close(self, *, reset: bool = False) -> None:
        if reset:  # a socket that may not linger resets its peer
            raw = self._writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        self._writer.close()

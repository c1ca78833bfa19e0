"""The hot path to the engines: pooled keep-alive connections, one exchange per `async with`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from disagg_router.engines.connection import Connection, UpstreamLimits
from disagg_router.errors import UpstreamError, UpstreamUnreachable
from disagg_router.interfaces import EngineCall

# A connection idle for this share of the keep-alive time is far from the engine's own limit.
_ONCE_IDLE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class _Origin:
    host: str
    port: int
    tls: bool
    host_header: str


class UpstreamResponse:
    """interfaces.EngineResponse over a connection."""

    def __init__(self, connection: Connection, idle_s: float) -> None:
        self._connection = connection
        self._idle_s = idle_s
        self._read_ahead = b""
        self.status: int = connection.status
        self.headers: Mapping[str, str] = connection.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        if self._read_ahead:
            data, self._read_ahead = self._read_ahead, b""
            yield data
        while data := await self._connection.take(self._idle_s):
            yield data

    async def read(self) -> bytes:
        return b"".join([data async for data in self.chunks()])

    async def peek(self, limit_s: float) -> bytes:
        """What has been read ahead of `chunks`, with more of the body added; unchanged at the end of the body."""
        self._read_ahead += await self._connection.take(max(limit_s, 0))
        return self._read_ahead


class _Pool:
    """The connections to one origin. Idle ones are used last in, first out, so that a quiet pool shrinks."""

    def __init__(self, origin: _Origin, limits: UpstreamLimits, ssl_context: ssl.SSLContext | None) -> None:
        self.origin = origin
        self._limits = limits
        self._ssl = ssl_context
        self._loop = asyncio.get_running_loop()
        self._all: set[Connection] = set()
        self._opening = 0
        self._idle: dict[Connection, asyncio.TimerHandle] = {}

    @property
    def empty(self) -> bool:
        return not self._all and not self._opening

    def reuse(self, max_idle_s: float) -> Connection | None:
        while self._idle:
            connection, closing = self._idle.popitem()
            if closing.when() - self._loop.time() < self._limits.keep_alive_s - max_idle_s:
                self._idle[connection] = closing  # the youngest is too old, so all are
                return None
            closing.cancel()
            if connection.usable:
                return connection
        return None

    async def connect(self) -> Connection:
        if len(self._all) + self._opening >= self._limits.connections:
            raise UpstreamUnreachable(f"{self._limits.connections} connections to one engine are in use")
        self._opening += 1
        try:
            async with asyncio.timeout(self._limits.connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._limits, self._forget),
                    self.origin.host,
                    self.origin.port,
                    ssl=self._ssl,
                )
        except TimeoutError as exc:
            raise UpstreamUnreachable(
                f"the engine did not accept a connection within {self._limits.connect_s:g} s"
            ) from exc
        except OSError as exc:
            raise UpstreamUnreachable("the engine did not accept a connection") from exc
        finally:
            self._opening -= 1
        self._all.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        if connection.finish() and len(self._idle) < self._limits.idle_connections:
            self._idle[connection] = self._loop.call_later(self._limits.keep_alive_s, connection.abort)
        else:
            connection.abort()

    def close(self) -> None:
        for connection in tuple(self._all):
            connection.abort()

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        timer = self._idle.pop(connection, None)
        if timer is not None:
            timer.cancel()


class Upstream:
    """Requests to any number of engines. Must be made, used and closed on one event loop."""

    def __init__(self, limits: UpstreamLimits | None = None, ssl_context: ssl.SSLContext | None = None) -> None:
        self._limits = limits or UpstreamLimits()
        self._ssl = ssl_context
        self._pools: dict[str, _Pool] = {}
        self._closed = False

    @asynccontextmanager
    async def open(self, url: str, call: EngineCall) -> AsyncIterator[UpstreamResponse]:
        """POST `call` and wait for the head of the answer. Leaving before the end of the body aborts the request.

        Raises UpstreamUnreachable when there is no connection, UpstreamTimeout past a limit, UpstreamError when the
        engine goes away.
        """
        pool = self._pool(url)
        connection = await self._exchange(pool, call)
        try:
            yield UpstreamResponse(connection, self._limits.idle_s)
        finally:
            pool.release(connection)

    async def close(self) -> None:
        """Aborts what is in flight."""
        self._closed = True
        for pool in self._pools.values():
            pool.close()
        await asyncio.sleep(0)  # connection_lost runs in the loop's next turn

    async def _exchange(self, pool: _Pool, call: EngineCall) -> Connection:
        """A connection with the head of its answer read.

        An engine may close an idle connection just as it is used again. Only then, and only when it is known that
        the engine never read the request, the request is sent again, on a new connection. A request to be sent
        once takes no connection on which that can happen.
        """
        request = _request(pool.origin, call)
        limit_s = self._limits.first_byte_s if call.head_limit_s is None else call.head_limit_s
        connection = pool.reuse(self._limits.keep_alive_s * (_ONCE_IDLE_SHARE if call.once else 1))
        if connection is not None:
            try:
                return await self._send(connection, call, request, limit_s)
            except UpstreamError:
                if call.once or not connection.unseen:
                    raise
        return await self._send(await pool.connect(), call, request, limit_s)

    async def _send(self, connection: Connection, call: EngineCall, request: bytes, limit_s: float) -> Connection:
        try:
            call.on_sent()
            await connection.send(request, limit_s)
        except BaseException:
            connection.abort()
            raise
        return connection

    def _pool(self, url: str) -> _Pool:
        if self._closed:
            raise UpstreamError("the router is shutting down")
        pool = self._pools.get(url)
        if pool is None:
            # Engines come back on new ports: pools that nothing uses any more go when a new one comes.
            self._pools = {known: pool for known, pool in self._pools.items() if not pool.empty}
            origin = _origin(url)
            pool = self._pools[url] = _Pool(origin, self._limits, self._context() if origin.tls else None)
        return pool

    def _context(self) -> ssl.SSLContext:
        if self._ssl is None:
            self._ssl = ssl.create_default_context()
        return self._ssl


def _origin(url: str) -> _Origin:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return _Origin(parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.netloc)


def _request(origin: _Origin, call: EngineCall) -> bytes:
    """Head and body in one piece, so that they leave in one write."""
    lines = [f"POST {call.path} HTTP/1.1", f"host: {origin.host_header}"]
    if not any(name == "content-type" for name, _ in call.headers):
        lines.append("content-type: application/json")
    lines += [f"{name}: {value}" for name, value in call.headers]
    lines.append(f"content-length: {len(call.body)}")
    if any("\r" in line or "\n" in line for line in lines):
        raise UpstreamError("a header of the request holds a line break")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + call.body

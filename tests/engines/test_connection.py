"""One connection's parsing, fed by hand: every split of the bytes, every way an answer can end."""

from __future__ import annotations

import asyncio
import socket

import pytest

from disagg_router.engines.connection import Connection, UpstreamLimits
from disagg_router.errors import UpstreamError, UpstreamTimeout

BODY = b'data: {"a":1}\n\ndata: [DONE]\n\n'
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nX-A: 1\r\nx-a: 2\r\n\r\n"
    b"%x\r\n%b\r\n%x;ext=1\r\n%b\r\n0\r\nt: 1\r\n\r\n" % (10, BODY[:10], len(BODY) - 10, BODY[10:])
)
LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nX-A: 1, 2\r\n\r\n%b" % (len(BODY), BODY)
CONTINUED = b"HTTP/1.1 100 Continue\r\nx-a: no\r\n\r\n" + LENGTH
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nconnection: close\r\nx-a: 1, 2\r\n\r\n" + BODY


class HandFedTransport(asyncio.Transport):
    """Records what the connection does to its socket."""

    def __init__(self) -> None:
        super().__init__({"socket": socket.socket()})
        self.written = b""
        self.reading = True
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True
        self.get_extra_info("socket").close()

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return 0


class Fed:
    """A connection with one request under way."""

    def __init__(self, limits: UpstreamLimits | None = None) -> None:
        self.transport = HandFedTransport()
        self.connection = Connection(limits or UpstreamLimits(), lambda lost: None)
        self.connection.connection_made(self.transport)
        self.sending = asyncio.ensure_future(self.connection.send(b"POST / HTTP/1.1\r\n\r\n", 5))

    async def __aenter__(self) -> Fed:
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.sending.cancel()
        await asyncio.gather(self.sending, return_exceptions=True)
        self.transport.abort()

    async def body(self) -> bytes:
        await self.sending
        taken = b""
        while data := await self.connection.take(0.2):
            taken += data
        return taken


@pytest.mark.parametrize("answer", [CHUNKED, LENGTH, CONTINUED], ids=["chunked", "length", "after 100"])
async def test_any_split_gives_the_same_body(answer: bytes) -> None:
    """Two reads that meet at any byte, and one read per byte, give one body, and the connection can be used again."""
    for at in range(1, len(answer)):
        async with Fed() as fed:
            fed.connection.data_received(answer[:at])
            fed.connection.data_received(answer[at:])
            assert await fed.body() == BODY
            assert fed.connection.headers["x-a"] == "1, 2"
            assert fed.connection.finish()
    async with Fed() as fed:
        for i in range(len(answer)):
            fed.connection.data_received(answer[i : i + 1])
        assert await fed.body() == BODY


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    """An orderly close is the end of such a body; the connection is not used again."""
    async with Fed() as fed:
        fed.connection.data_received(UNTIL_CLOSE)
        fed.connection.connection_lost(None)
        assert await fed.body() == BODY
        assert not fed.connection.finish()


@pytest.mark.parametrize(
    ("answer", "exc"),
    [
        (CHUNKED[:-5], None),
        (LENGTH[:-1], None),
        (UNTIL_CLOSE, ConnectionResetError()),
        (LENGTH[:-1], ConnectionResetError()),
    ],
    ids=["chunked without its end", "short of its length", "reset instead of closed", "reset"],
)
async def test_a_cut_body_is_never_a_clean_end(answer: bytes, exc: Exception | None) -> None:
    """What arrived is handed on, then the loss is raised."""
    async with Fed() as fed:
        fed.connection.data_received(answer)
        await fed.sending
        fed.connection.connection_lost(exc)
        assert await fed.connection.take(1)
        with pytest.raises(UpstreamError, match="before the end"):
            await fed.connection.take(1)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000,
    ],
    ids=["another protocol", "two framings", "upgrade", "endless head"],
)
async def test_what_is_no_answer_is_refused(answer: bytes) -> None:
    """Anything but HTTP with a head of sane size aborts the connection."""
    async with Fed() as fed:
        fed.connection.data_received(answer)
        with pytest.raises(UpstreamError, match=r"not HTTP/1\.1|exceeds"):
            await fed.sending
        assert fed.transport.aborted


async def test_a_malformed_chunk_is_refused() -> None:
    """A chunk size that is no number ends the body with an error."""
    async with Fed() as fed:
        fed.connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await fed.sending
        fed.connection.data_received(b"zz\r\n")
        with pytest.raises(UpstreamError, match="not HTTP"):
            await fed.connection.take(1)


async def test_gaps_are_limited_only_while_somebody_waits() -> None:
    """The limit starts when the consumer waits; a slow consumer never trips it."""
    async with Fed() as fed:
        fed.connection.data_received(LENGTH[:-1])
        await fed.sending
        await asyncio.sleep(0.1)
        assert await fed.connection.take(0.05)
        with pytest.raises(UpstreamTimeout):
            await fed.connection.take(0.05)
        assert fed.transport.aborted


async def test_reading_stops_above_the_high_water_mark() -> None:
    """The socket is left alone until the consumer takes what is there."""
    async with Fed() as fed:
        fed.connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 10000000\r\n\r\n")
        await fed.sending
        for _ in range(5):
            assert fed.transport.reading
            fed.connection.data_received(b"a" * 65_536)
        assert not fed.transport.reading
        assert len(await fed.connection.take(1)) == 5 * 65_536
        assert fed.transport.reading


@pytest.mark.parametrize(
    "answer",
    [LENGTH + b"HTTP/1.1 200 OK\r\n", LENGTH.replace(b"X-A: 1, 2", b"connection: close"), LENGTH[:-1]],
    ids=["two answers", "close asked for", "left early"],
)
async def test_a_doubtful_connection_is_not_used_again(answer: bytes) -> None:
    """Surplus bytes, a wish to close, or an unread rest."""
    async with Fed() as fed:
        fed.connection.data_received(answer)
        await fed.sending
        assert not fed.connection.finish()
        assert fed.transport.aborted


async def test_unasked_bytes_end_an_idle_connection() -> None:
    """Nothing may arrive while no request is out."""
    async with Fed() as fed:
        fed.connection.data_received(LENGTH)
        await fed.body()
        assert fed.connection.finish()
        fed.connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        assert not fed.connection.usable

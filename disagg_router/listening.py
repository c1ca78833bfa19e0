"""Sockets, HTTP servers and signals, the same for the router and the controller."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from disagg_router.errors import ConfigError

CUT_S = 2  # what connections get to close after everything running has ended or been given up


def listen(host: str, port: int, option: str) -> socket.socket:
    """Bind before anything else is started. Raises ConfigError, naming the command-line option to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named asyncio sets TCP_NODELAY on what it accepts; without, Nagle holds answers for 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(4096)  # here, not later: a second listener must fail now and not after the set-up
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"cannot listen on {bracketed(host)}:{port} ({exc.strerror}): choose another with {option}"
        ) from exc
    return sock


def bracketed(host: str) -> str:
    """`host` as it stands in front of a port."""
    return f"[{host}]" if ":" in host else host


class Listener(uvicorn.Server):
    """A uvicorn server on a bound socket that leaves signals to us: there are things to be done before it stops."""

    def __init__(self, app: Callable[..., Any], sock: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=CUT_S,
        )
        super().__init__(config)
        self._sock = sock

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_on_socket(self) -> None:
        await self.serve(sockets=[self._sock])


async def until_signalled() -> str:
    """The name of the SIGTERM or SIGINT that came. Later ones change nothing: what was asked for is under way."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[str] = loop.create_future()

    def on(received: signal.Signals) -> None:
        if not arrived.done():
            arrived.set_result(received.name)

    for received in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(received, on, received)
    return await arrived

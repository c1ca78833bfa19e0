"""Runs the listeners and the brain in one event loop, and takes them down in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from disagg_router.errors import ConfigError
from disagg_router.routing.router import Router

log = logging.getLogger(__name__)

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
        raise ConfigError(f"cannot listen on {host}:{port} ({exc.strerror}): choose another with {option}") from exc
    return sock


class Listener(uvicorn.Server):
    """A uvicorn server on a bound socket that leaves signals to us."""

    def __init__(self, app: FastAPI, sock: socket.socket) -> None:
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
    """The name of the SIGTERM or SIGINT that came."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[str] = loop.create_future()

    def on(received: signal.Signals) -> None:
        if not arrived.done():
            arrived.set_result(received.name)

    for received in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(received, on, received)
    return await arrived


async def run_router(
    router: Router,
    brain: Coroutine[Any, Any, None],
    listeners: list[Listener],
    *,
    drain_s: float,
) -> None:
    """Until a signal: then nothing new is taken, what runs may end, and the listeners close.

    Raises whatever ended the brain or a listener before that.
    """
    work = [asyncio.create_task(brain), *(asyncio.create_task(listener.run_on_socket()) for listener in listeners)]
    signalled = asyncio.create_task(until_signalled())
    try:
        done, _ = await asyncio.wait([*work, signalled], return_when=asyncio.FIRST_COMPLETED)
        if signalled in done:
            log.info("%s: draining for at most %g s", signalled.result(), drain_s)
            if not await router.drain(drain_s):
                log.warning("%g s are over: what still runs is cut", drain_s)
        for task in done - {signalled}:
            task.result()
    finally:
        signalled.cancel()
        for listener in listeners:
            listener.should_exit = True
        await asyncio.wait(work[1:], timeout=CUT_S + 3)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

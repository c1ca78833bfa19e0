"""`serve`: a controller and a router on one host, as two processes of one parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from disagg_router.errors import LaunchError
from disagg_router.interfaces import JsonObject
from disagg_router.proxy.admin_client import fetch_status
from disagg_router.proxy.server import until_signalled

OWNER_VARIABLE = "DISAGG_ROUTER_OWNER"  # a child that finds its parent's pid here dies with it
SETTLE_LIMIT_S = 120.0  # pair tests that take longer do not hold up the ready line
POLL_S = 0.25
# With limits.drain_s at its default, Ctrl-C takes less than 30 s however busy the router is.
ROUTER_STOP_S = 3.0
ENGINES_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to run; `instances` is how many must be ready before the service is."""

    cluster_file: str
    controller_port: int
    public_url: str
    admin_url: str
    admin_token: str | None
    proxy_options: tuple[str, ...]
    instances: int
    drain_s: float


class ChildEnded(LaunchError):
    """One of the two ended by itself; it has said why on stderr."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"the {name} ended with status {status}")
        self.status = status


class _Signalled(Exception):
    """SIGTERM or SIGINT: unwind in order."""


async def serve(plan: ServePlan) -> None:
    """Until a signal; prints the ready line. Raises ChildEnded when a child does not last."""
    signalled = asyncio.create_task(until_signalled())
    children: dict[str, asyncio.subprocess.Process] = {}
    try:
        async with _ended_when_left(children, plan.drain_s):
            # The router first: a port in use shows in a second, before any engine is started.
            children["router"] = await _spawn(
                "proxy",
                plan.cluster_file,
                "--controller",
                f"http://127.0.0.1:{plan.controller_port}",
                *plan.proxy_options,
            )
            await _first(signalled, _until_answering(plan), children)
            children["controller"] = await _spawn("controller", plan.cluster_file, "--port", str(plan.controller_port))
            await _first(signalled, _until_ready(plan), children)
            print(f"ready {plan.public_url}", flush=True)  # noqa: T201 - the contract: the only line on stdout
            await _first(signalled, asyncio.Event().wait(), children)
    except _Signalled:
        pass
    finally:
        signalled.cancel()


async def _spawn(*command: str) -> asyncio.subprocess.Process:
    # A session of its own: Ctrl-C in a terminal must reach the parent only, which stops the two in order.
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "disagg_router",
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, OWNER_VARIABLE: str(os.getpid())},
        start_new_session=True,
    )


async def _first(
    signalled: asyncio.Task[str], step: Coroutine[Any, Any, object], children: dict[str, asyncio.subprocess.Process]
) -> None:
    """Until the step is done. Raises _Signalled, or ChildEnded."""
    work = asyncio.create_task(step)
    ends = {asyncio.create_task(child.wait()): name for name, child in children.items()}
    try:
        done, _ = await asyncio.wait({work, signalled, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if signalled in done:
            raise _Signalled
        for end, name in ends.items():
            if end in done:
                raise ChildEnded(name, end.result())
        work.result()
    finally:
        for task in (work, *ends):
            task.cancel()


async def _until_answering(plan: ServePlan) -> None:
    while True:
        with contextlib.suppress(LaunchError):
            await fetch_status(plan.admin_url, plan.admin_token)
            return
        await asyncio.sleep(POLL_S)


async def _until_ready(plan: ServePlan) -> None:
    """Every instance takes requests, and every pair has had its first test or SETTLE_LIMIT_S is over."""
    await _until(plan, lambda status: _all_ready(status, plan.instances))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_LIMIT_S):
            await _until(plan, lambda status: bool(status["settled"]))


async def _until(plan: ServePlan, holds: Callable[[JsonObject], bool]) -> None:
    while not holds(await fetch_status(plan.admin_url, plan.admin_token)):  # noqa: ASYNC110 - it is another process's
        await asyncio.sleep(POLL_S)


def _all_ready(status: JsonObject, instances: int) -> bool:
    return sum(one["state"] == "ready" for one in status["instances"]) >= instances and bool(status["ready"])


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def _ended_when_left(children: dict[str, asyncio.subprocess.Process], drain_s: float) -> AsyncIterator[None]:
    """The router drains while the engines still run; then the controller stops them."""
    try:
        yield
    finally:
        for name, limit_s in (("router", drain_s + ROUTER_STOP_S), ("controller", ENGINES_STOP_S)):
            if name in children:
                await _end(children[name], limit_s)


async def _end(child: asyncio.subprocess.Process, limit_s: float) -> None:
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(limit_s):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()

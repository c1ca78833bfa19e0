"""`serve`: a controller and a router on one host, as two processes of one parent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from disagg_router.controller.ports import PortAllocator
from disagg_router.controller.processes import kill_marked
from disagg_router.controller.state import read_record, state_folder
from disagg_router.errors import LaunchError
from disagg_router.interfaces import JsonObject
from disagg_router.listening import until_signalled
from disagg_router.proxy.admin_client import fetch_status

log = logging.getLogger(__name__)

OWNER_VARIABLE = "DISAGG_ROUTER_OWNER"  # a child that finds its parent's pid here dies with it
SETTLE_LIMIT_S = 120.0  # pair tests that take longer do not hold up the ready line
POLL_S = 0.25
# With limits.drain_s and engine.stop_grace_s at their defaults, Ctrl-C takes less than 30 s however busy the router is.
ROUTER_STOP_S = 3.0
ENGINES_STOP_S = 5.0  # what the controller needs on top of the grace that its engines get
KILL_LIMIT_S = 5.0

Children = dict[str, asyncio.subprocess.Process]


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to run; `instances` is how many must be ready before the service is.

    `ready_limit_s` bounds that wait. `command` stands in front of the two children's own words.
    """

    cluster_file: str
    cluster: str
    public_url: str
    admin_url: str
    admin_token: str | None
    proxy_options: tuple[str, ...]
    instances: int
    drain_s: float
    stop_grace_s: float
    ready_limit_s: float
    answer_limit_s: float = 30.0
    command: tuple[str, ...] = (sys.executable, "-m", "disagg_router")


class ChildEnded(LaunchError):
    """One of the two ended by itself, with an exit status or, negative, by a signal."""

    def __init__(self, name: str, status: int) -> None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        super().__init__(f"the {name} {how}, so everything was stopped: start again")
        self.status = status

    @property
    def explained(self) -> bool:
        """Whether it has said why on stderr; a second line would only be in the way then."""
        return self.status in (1, 2)


class _Stopped(Exception):
    """By SIGTERM, SIGINT or `down`: unwind in order."""


async def serve(plan: ServePlan) -> None:
    """Until a signal or `down`; prints the ready line.

    Raises ChildEnded when a child does not last, LaunchError when the service does not become ready in time or
    something is left of it.
    """
    signalled = asyncio.create_task(until_signalled())
    children: Children = {}
    # Not a port of the ephemeral range: while nobody listens yet, the router's own polling could connect to itself.
    # The lease keeps engines, of this cluster and others, off the port.
    with contextlib.closing(PortAllocator(random.Random()).lease(1)) as lease:
        port = str(lease.ports[0])
        try:
            async with _ended_when_left(children, plan):
                # The router first: a port in use shows in a second, before any engine is started.
                fleet = ("--controller", f"http://127.0.0.1:{port}")
                router = await _spawn(plan, "proxy", plan.cluster_file, *fleet, *plan.proxy_options)
                children["router"] = router
                await _first(signalled, until_answering(plan, router.pid), children)
                children["controller"] = await _spawn(plan, "controller", plan.cluster_file, "--port", port)
                await _first(signalled, until_ready(plan, router.pid), children)
                print(f"ready {plan.public_url}", flush=True)  # noqa: T201 - the contract: the only line on stdout
                await _first(signalled, asyncio.Event().wait(), children)
        except _Stopped:
            pass
        finally:
            signalled.cancel()


async def _spawn(plan: ServePlan, *words: str) -> asyncio.subprocess.Process:
    # A session of its own: Ctrl-C in a terminal must reach the parent only, which stops the two in order.
    return await asyncio.create_subprocess_exec(
        *plan.command,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, OWNER_VARIABLE: str(os.getpid())},
        start_new_session=True,
    )


async def _first(signalled: asyncio.Task[str], step: Coroutine[Any, Any, object], children: Children) -> None:
    """Until the step is done. Raises _Stopped, or ChildEnded."""
    work = asyncio.create_task(step)
    ends = {asyncio.create_task(child.wait()): name for name, child in children.items()}
    try:
        done, _ = await asyncio.wait({work, signalled, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if signalled in done:
            raise _Stopped
        for end, name in ends.items():
            if end in done:
                raise _Stopped if (name, end.result()) == ("controller", 0) else ChildEnded(name, end.result())
        work.result()
    finally:
        for task in (work, *ends):
            task.cancel()


# --- waiting ----------------------------------------------------------------------------------------------------


async def until_answering(plan: ServePlan, router_pid: int) -> None:
    """The router shows its status. Raises LaunchError when it takes too long."""
    await _until(plan, router_pid, lambda _: True, plan.answer_limit_s, "the router did not answer")


async def until_ready(plan: ServePlan, router_pid: int) -> None:
    """Every instance takes requests, and every pair has had its first test or SETTLE_LIMIT_S is over.

    Raises LaunchError when it takes too long.
    """

    def ready(status: JsonObject) -> bool:
        return _all_ready(status, plan.instances)

    def settled(status: JsonObject) -> bool:
        return bool(status["settled"])

    await _until(plan, router_pid, ready, plan.ready_limit_s, "not everything is ready")
    with contextlib.suppress(LaunchError):
        await _until(plan, router_pid, settled, SETTLE_LIMIT_S, "not every pair is tested")


async def _until(
    plan: ServePlan, router_pid: int, holds: Callable[[JsonObject], bool], limit_s: float, otherwise: str
) -> None:
    """One poll that fails is no reason to give up: a busy host is late, and the end of a child shows elsewhere. What
    another router answers there says nothing: ours is about to find its port in use."""
    last = "it showed no status"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    status = await fetch_status(plan.admin_url, plan.admin_token)
                    if status.get("pid") == router_pid:
                        if holds(status):
                            return
                        last = _shown(status)
                except LaunchError as exc:
                    log.debug("%s", exc)
                await asyncio.sleep(POLL_S)
    raise LaunchError(f"{otherwise} within {limit_s:g} s; the last status of {plan.admin_url}: {last}")


def _all_ready(status: JsonObject, instances: int) -> bool:
    return sum(one["state"] == "ready" for one in status["instances"]) >= instances and bool(status["ready"])


def _shown(status: JsonObject) -> str:
    return ", ".join(f"{one['id']} {one['state']}" for one in status["instances"]) or "no instance is known"


# --- stopping ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _ended_when_left(children: Children, plan: ServePlan) -> AsyncIterator[None]:
    """The router drains while the engines still run; then the controller stops them."""
    try:
        yield
    finally:
        limits_s = {"router": plan.drain_s + ROUTER_STOP_S, "controller": plan.stop_grace_s + ENGINES_STOP_S}
        for name, limit_s in limits_s.items():
            if name in children and await _end(children[name], limit_s) < 0 and name == "controller":
                await _kill_left(plan.cluster, children[name].pid)


async def _end(child: asyncio.subprocess.Process, limit_s: float) -> int:
    """Its exit status; negative when a signal ended it, ours or another."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(limit_s):
                await child.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
    return await child.wait()


async def _kill_left(cluster: str, controller_pid: int) -> None:
    """A controller that was killed stops nothing; its guardian would, but only after we are gone. One that had not
    claimed the cluster yet has started nothing, and what runs under the cluster's name is another one's."""
    record = read_record(state_folder(cluster))
    if record is None or record.pid != controller_pid:
        return
    if left := await asyncio.to_thread(kill_marked, cluster, KILL_LIMIT_S):
        raise LaunchError(f"processes {left} could not be killed: see who owns them")

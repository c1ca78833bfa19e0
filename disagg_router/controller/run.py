"""A controller from its first check to its last clean-up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console

from disagg_router.config import ClusterConfig
from disagg_router.controller.api import create_app
from disagg_router.controller.engine_host import HostSettings
from disagg_router.controller.feed import FleetFeed
from disagg_router.controller.guardian import Guardian
from disagg_router.controller.loop import Controller, EngineLauncher, LoopSettings
from disagg_router.controller.processes import kill_marked, wait_unmarked
from disagg_router.controller.progress import StartProgress
from disagg_router.controller.reconcile import Limits
from disagg_router.controller.state import ClusterState, state_folder
from disagg_router.errors import LaunchError
from disagg_router.interfaces import Clock, CommandBuilder
from disagg_router.listening import Listener, listen, until_signalled
from disagg_router.model import EngineAddress, Fingerprint, InstanceSpec

_KILL_LIMIT_S = 5.0
_ORPHAN_LIMIT_S = 4.0  # how long supervisors may take to end their engines once their actors are gone


class ConnectedLauncher(EngineLauncher, Protocol):
    """A launcher with the connection it hangs on."""

    @property
    def lifelines(self) -> Sequence[int]:
        """Processes of this host without which nothing works."""
        ...

    def close(self) -> None:
        """Give the connection up. Called in the main thread."""
        ...


Connect = Callable[[str, int, HostSettings], ConnectedLauncher]


@dataclass(frozen=True, slots=True)
class ControllerParts:
    """What the composition root provides. `connect` (cluster, number of instances, settings) may block for
    seconds and runs in the main thread."""

    connect: Connect
    build: CommandBuilder
    healthy: Callable[[str], Awaitable[bool]]
    fingerprint: Callable[[InstanceSpec], Fingerprint]
    clock: Clock


async def run_controller(
    config: ClusterConfig,
    cluster: str,
    specs: Sequence[InstanceSpec],
    parts: ControllerParts,
    *,
    host: str,
    port: int,
) -> None:
    """Run until SIGTERM or SIGINT; nothing of the cluster is left on this host afterwards.

    Raises ConfigError, LaunchError.
    """
    for spec in specs:
        parts.build(spec, EngineAddress("127.0.0.1", 1, 2, 3, 4), "check")  # mistakes show before anything starts
    with ClusterState(cluster, state_folder(cluster)) as state, listen(host, port, "--port") as listener:
        state.publish(listener.getsockname()[1])
        settings = HostSettings(str(state.log_folder), config.engine.stop_grace_s)
        # Ray prints other processes' last words to sys.stdout, which belongs to our own output.
        with _leaving_nothing(cluster), contextlib.redirect_stdout(sys.stderr):
            launcher = parts.connect(cluster, len(specs), settings)
            try:
                await _live(config, cluster, specs, parts, launcher, listener)
            finally:
                launcher.close()


async def _live(
    config: ClusterConfig,
    cluster: str,
    specs: Sequence[InstanceSpec],
    parts: ControllerParts,
    launcher: ConnectedLauncher,
    listener: socket.socket,
) -> None:
    feed = FleetFeed(first_version=int(time.time()))  # above every version of an earlier controller
    with StartProgress(Console(file=sys.stderr), parts.clock.now_s) as progress:
        controller = Controller(
            launcher,
            specs,
            healthy=parts.healthy,
            fingerprint=parts.fingerprint,
            clock=parts.clock,
            feed=feed,
            settings=_loop_settings(config),
            progress=progress,
        )
        async with _serving(feed, listener):
            # Not earlier: Ray installs handlers of its own while it connects.
            signalled = asyncio.create_task(until_signalled())
            lost = asyncio.create_task(_first_end(launcher.lifelines))
            life = asyncio.create_task(_keep(controller, progress))
            try:
                await asyncio.wait((signalled, lost, life), return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone = lost.done()
                for task in (signalled, lost, life):
                    task.cancel()
                *_, end = await asyncio.gather(signalled, lost, life, return_exceptions=True)
                # Without Ray nobody can be asked to stop; the supervisors have seen it too.
                await (asyncio.to_thread(_end_orphans, cluster) if gone else controller.stop())
            if gone:
                raise LaunchError("the Ray that this controller hangs on is gone: start again")
            if isinstance(end, Exception):
                raise end


async def _keep(controller: Controller, progress: StartProgress) -> None:
    await controller.bring_up()
    progress.started()
    await controller.run()


def _loop_settings(config: ClusterConfig) -> LoopSettings:
    return LoopSettings(
        limits=Limits(start_limit_s=config.engine.start_limit_s),
        interval_s=min(0.5, config.router.health.interval_s),
        probe_limit_s=config.router.health.timeout_s,
        stop_limit_s=config.engine.stop_grace_s + 15,
        boot=secrets.token_hex(4),
    )


@contextlib.contextmanager
def _leaving_nothing(cluster: str) -> Iterator[None]:
    guardian = Guardian(cluster)
    try:
        yield
    finally:
        kill_marked(cluster, _KILL_LIMIT_S)
        guardian.dismiss()


@contextlib.asynccontextmanager
async def _serving(feed: FleetFeed, sock: socket.socket) -> AsyncIterator[None]:
    server = Listener(create_app(feed), sock)
    task = asyncio.create_task(server.run_on_socket())
    try:
        yield  # the socket listens already: who connects before the server is up waits a moment
    finally:
        server.should_exit = True
        feed.close()  # and no earlier: routers that wait would ask again and again while the engines stop
        await task


async def _first_end(pids: Sequence[int]) -> None:
    """Until one of the processes ends; for ever without any."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        for pid in pids:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            stack.callback(os.close, pidfd)
            loop.add_reader(pidfd, ended.set)
            stack.callback(loop.remove_reader, pidfd)
        await ended.wait()


def _end_orphans(cluster: str) -> None:
    """Before the connection is closed, which takes seconds when the other side is gone."""
    wait_unmarked(cluster, _ORPHAN_LIMIT_S)
    kill_marked(cluster, _KILL_LIMIT_S)

"""A controller from its first check to its last clean-up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import uvicorn
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
from disagg_router.controller.spec import bracketed
from disagg_router.controller.state import ClusterState, state_folder
from disagg_router.errors import LaunchError
from disagg_router.interfaces import Clock, CommandBuilder
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


@dataclass(frozen=True, slots=True)
class Hooks:
    """`listening` gets the API's URL as soon as it answers, `ready` once every instance has answered.

    sys.stdout is redirected to stderr while they run.
    """

    listening: Callable[[str], None] = lambda _: None
    ready: Callable[[str], None] = lambda _: None


async def run_controller(
    config: ClusterConfig,
    cluster: str,
    specs: Sequence[InstanceSpec],
    parts: ControllerParts,
    *,
    host: str,
    port: int,
    hooks: Hooks | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run until SIGTERM, SIGINT or `stop`; nothing of the cluster is left on this host afterwards.

    With `stop` given, signals are the caller's business, who installs its handlers in `hooks.listening` or later:
    Ray installs its own while it connects. Raises ConfigError, LaunchError.
    """
    for spec in specs:
        parts.build(spec, EngineAddress("127.0.0.1", 1, 2, 3, 4), "check")  # mistakes show before anything starts
    with ClusterState(cluster, state_folder(cluster)) as state, _listen(host, port) as listener:
        state.publish(listener.getsockname()[1])
        settings = HostSettings(str(state.log_folder), config.engine.stop_grace_s)
        # Ray prints other processes' last words to sys.stdout, which belongs to our own output.
        with _leaving_nothing(cluster), contextlib.redirect_stdout(sys.stderr):
            launcher = parts.connect(cluster, len(specs), settings)
            try:
                await _live(config, cluster, specs, parts, launcher, _Api(listener, host, hooks or Hooks(), stop))
            finally:
                launcher.close()


@dataclass(frozen=True, slots=True)
class _Api:
    listener: socket.socket
    host: str
    hooks: Hooks
    stop: asyncio.Event | None

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{bracketed(host)}:{self.listener.getsockname()[1]}"


async def _live(
    config: ClusterConfig,
    cluster: str,
    specs: Sequence[InstanceSpec],
    parts: ControllerParts,
    launcher: ConnectedLauncher,
    api: _Api,
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
        async with _serving(feed, api.listener), _stop_asked(api.stop) as asked:
            api.hooks.listening(api.url)
            life = asyncio.create_task(_keep(controller, progress, lambda: api.hooks.ready(api.url)))
            lost = asyncio.create_task(_first_end(launcher.lifelines))
            waits = (life, lost, asyncio.create_task(asked.wait()))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone = lost.done()
                for task in waits:
                    task.cancel()
                results = await asyncio.gather(*waits, return_exceptions=True)
                # Without Ray nobody can be asked to stop; the supervisors have seen it too.
                await (asyncio.to_thread(_end_orphans, cluster) if gone else controller.stop())
            if gone:
                raise LaunchError("the Ray that this controller hangs on is gone: start again")
            if isinstance(results[0], Exception):
                raise results[0]


async def _keep(controller: Controller, progress: StartProgress, ready: Callable[[], None]) -> None:
    await controller.bring_up()
    progress.started()
    ready()
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
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """The API's socket, before anything is started. Raises LaunchError when the port is taken."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], info[1])
    except OSError as exc:
        raise LaunchError(f"cannot resolve --host {host}: give an address of this host") from exc
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(info[4])
        except OSError as exc:
            raise LaunchError(f"cannot listen on {host}:{port} ({exc.strerror}): choose another --port") from exc
        yield listener


@contextlib.contextmanager
def _leaving_nothing(cluster: str) -> Iterator[None]:
    guardian = Guardian(cluster)
    try:
        yield
    finally:
        kill_marked(cluster, _KILL_LIMIT_S)
        guardian.dismiss()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the controller has its own, and stops its engines first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _serving(feed: FleetFeed, listener: socket.socket) -> AsyncIterator[None]:
    server = _Server(uvicorn.Config(create_app(feed), log_level="warning", lifespan="off", timeout_graceful_shutdown=2))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield  # the socket listens already: who connects before the server is up waits a moment
    finally:
        feed.close()
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def _stop_asked(given: asyncio.Event | None) -> AsyncIterator[asyncio.Event]:
    """`given`, or an event that SIGTERM and SIGINT set."""
    if given is not None:
        yield given
        return
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for signum in signals:
        loop.add_signal_handler(signum, asked.set)
    try:
        yield asked
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)


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

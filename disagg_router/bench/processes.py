"""The engines and routers that a measurement runs, each under a supervisor that ends it with this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from disagg_router.bench.contenders import Contender, router_config
from disagg_router.bench.exchange import fetch
from disagg_router.connectors.registry import build_connector
from disagg_router.controller.engine_host import EngineHost, HostSettings
from disagg_router.controller.processes import marked, send
from disagg_router.controller.spec import build_command
from disagg_router.errors import ConfigError, LaunchError
from disagg_router.model import EngineAddress, EngineCommand, InstanceId, InstanceSpec, Role

HOST = "127.0.0.1"
CORES = 2
ENGINE_START_LIMIT_S = 300.0  # four at once on two cores take a minute and a half
ROUTER_START_LIMIT_S = 120.0  # its pairs are tested in this time
POLL_S = 0.5
GRACE_S = 5.0
LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`args` are vLLM's, the same for every engine but for the chunk."""

    model: str
    served_name: str
    args: Mapping[str, Any]

    def with_chunk(self, chunk_tokens: int) -> dict[str, Any]:
        return {**self.args, "max-num-batched-tokens": chunk_tokens}


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """`pid` is the router's own; it is paused while another contender is measured."""

    contender: Contender
    port: int
    admin_port: int
    pid: int

    def pause(self) -> None:
        send(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        send(self.pid, signal.SIGCONT)


class Workshop:
    """Starts processes on this machine and stops all of them on the way out."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Logs and configs go to `folder`; `say` hears of each step."""
        self._folder, self._say = folder, say
        self._cluster = f"bench-{os.getpid()}"
        self._hosts: list[EngineHost] = []
        self._paused: list[RunningRouter] = []

    async def stop(self) -> None:
        for router in self._paused:
            router.resume()  # a stopped process does not hear SIGTERM
        await asyncio.gather(*(asyncio.to_thread(host.stop) for host in self._hosts))

    async def engines(self, settings: EngineSettings, chunks_tokens: Sequence[int]) -> dict[int, list[str]]:
        """Chunk -> urls of one engine per core. Raises ConfigError, LaunchError."""
        cores = sorted(os.sched_getaffinity(0))[:CORES]
        if len(cores) < CORES:
            raise ConfigError(f"the engines need {CORES} cores of their own: there is {len(cores)}")
        self._say(f"starting {len(chunks_tokens) * CORES} engines")
        urls: dict[int, list[str]] = {}
        waits = []
        for chunk_tokens in chunks_tokens:
            for core in cores:
                spec = self._engine_spec(settings, chunk_tokens, core)
                address = await self._start(spec, _engine_command)
                urls.setdefault(chunk_tokens, []).append(f"http://{address.host}:{address.http_port}")
                waits.append(self._until(spec.id, ENGINE_START_LIMIT_S, _healthy(address.http_port)))
        await asyncio.gather(*waits)
        return urls

    async def router(self, contender: Contender, settings: EngineSettings, urls: Sequence[str]) -> RunningRouter:
        """Ready, its pairs tested. Raises LaunchError."""
        self._say(f"starting the router of {contender.name}")
        args = settings.with_chunk(contender.chunk_tokens)
        config = self._folder / f"{contender.name}.yaml"
        text = router_config(contender, model=settings.model, served_name=settings.served_name, args=args, urls=urls)
        config.write_text(text, encoding="utf-8")
        spec = self._spec(f"router-{contender.name}", Role.UNIFIED, settings, {}, None)

        def command(spec: InstanceSpec, address: EngineAddress, incarnation: str) -> EngineCommand:
            ports = ("--port", str(address.http_port), "--admin-port", str(address.side_channel_port))
            return EngineCommand((sys.executable, "-m", "disagg_router", "proxy", str(config), *ports), {})

        address = await self._start(spec, command)
        status = await self._until(spec.id, ROUTER_START_LIMIT_S, _settled(address.side_channel_port, len(urls)))
        running = RunningRouter(contender, address.http_port, address.side_channel_port, int(status["pid"]))
        self._paused.append(running)
        return running

    async def settled(self, router: RunningRouter) -> None:
        """After a pause: it has looked at its engines again. Raises LaunchError."""
        name = f"router-{router.contender.name}"
        await self._until(name, ROUTER_START_LIMIT_S, _settled(router.admin_port, len(router.contender.roles)))

    # --- small parts ---

    def _engine_spec(self, settings: EngineSettings, chunk_tokens: int, core: int) -> InstanceSpec:
        args = settings.with_chunk(chunk_tokens)
        return self._spec(f"chunk{chunk_tokens}-core{core}", Role.UNIFIED, settings, args, (core,))

    def _spec(
        self, name: str, role: Role, settings: EngineSettings, args: Mapping[str, Any], cpus: tuple[int, ...] | None
    ) -> InstanceSpec:
        return InstanceSpec(
            id=InstanceId(name),
            cluster=self._cluster,
            role=role,
            index=len(self._hosts),
            model=settings.model,
            served_name=settings.served_name,
            revision=None,
            device="cpu",
            python=sys.executable,
            args=args,
            env={},
            gpus=0,
            cpus=cpus,
            labels={},
        )

    async def _start(
        self, spec: InstanceSpec, command: Callable[[InstanceSpec, EngineAddress, str], EngineCommand]
    ) -> EngineAddress:
        incarnation = f"{spec.id}-{secrets.token_hex(4)}"
        host = EngineHost(spec, incarnation, HostSettings(str(self._folder), GRACE_S))
        address = host.reserve(HOST)
        await asyncio.to_thread(host.spawn, command(spec, address, incarnation))
        self._hosts.append(host)
        return address

    async def _until(
        self, name: str, limit_s: float, found: Callable[[], Awaitable[dict[str, Any] | None]]
    ) -> dict[str, Any]:
        """What `found` finds. Raises LaunchError when it takes too long or the process is gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while True:
                    if (answer := await found()) is not None:
                        return answer
                    if not await asyncio.to_thread(marked, f"{self._cluster}/{name}"):
                        raise LaunchError(f"{name} ended: see {self._folder / name}.log")
                    await asyncio.sleep(POLL_S)
        raise LaunchError(f"{name} is not ready within {limit_s:g} s: see {self._folder / name}.log")


@asynccontextmanager
async def workshop(folder: Path, say: Callable[[str], None]) -> AsyncIterator[Workshop]:
    made = Workshop(folder, say)
    try:
        yield made
    finally:
        say("stopping everything")
        await made.stop()


def _engine_command(spec: InstanceSpec, address: EngineAddress, incarnation: str) -> EngineCommand:
    """As the controller would start it."""
    connector = build_connector("nixl", kv_load_failure_policy="recompute", lease_s=LEASE_S)
    return build_command(spec, address, incarnation, connector)


def _healthy(port: int) -> Callable[[], Awaitable[dict[str, Any] | None]]:
    async def found() -> dict[str, Any] | None:
        return None if await fetch(HOST, port, "/health") is None else {}

    return found


def _settled(admin_port: int, instances: int) -> Callable[[], Awaitable[dict[str, Any] | None]]:
    async def found() -> dict[str, Any] | None:
        content = await fetch(HOST, admin_port, "/status")
        if content is None:
            return None
        status: dict[str, Any] = msgspec.json.decode(content)
        ready = [one for one in status["instances"] if one["state"] == "ready"]
        return status if len(ready) == instances and all(p["state"] == "ready" for p in status["pairs"]) else None

    return found

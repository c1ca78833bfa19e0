"""A whole router in this process, on real sockets, in front of scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from disagg_router.config import ClusterConfig
from disagg_router.listening import Listener, listen
from disagg_router.wiring import RouterParts, build_router
from tests.fakes.engine import FakeEngine

ARGS = {"block-size": 32}


@dataclass
class Service:
    """`http` speaks to the public listener, `admin` to the admin one."""

    parts: RouterParts
    http: httpx.AsyncClient
    admin: httpx.AsyncClient
    port: int

    async def complete(
        self, prompt: Any = "hello", headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8} | fields
        return await self.http.post("/v1/completions", json=body, headers=headers)

    async def until(self, holds: Any, limit_s: float = 5.0) -> None:
        async with asyncio.timeout(limit_s):
            while not holds(self.parts.brain.fleet):  # noqa: ASYNC110 - the brain's own tasks move it
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(*engines: tuple[str, FakeEngine], settled: bool = True, **config: Any) -> AsyncIterator[Service]:
    """`engines` are (role, engine); ids are the role and a number. `config` holds sections of the cluster file."""
    counts: dict[str, int] = {}
    static = []
    for role, engine in engines:
        number = counts[role] = counts.get(role, -1) + 1
        static.append({"url": engine.url, "role": role, "id": f"{role}-{number}", "args": ARGS})
    router = {
        "policy": {"name": "threshold"},
        "allow_path_override": True,
        "health": {"interval_s": 0.05, "pair_retest_s": 0.2},
    }
    whole = {
        "model": {"served_name": "tiny"},
        "fleet": {"static": static},
        **config,
        "router": router | config.get("router", {}),
    }
    parts = build_router(ClusterConfig.model_validate(whole))
    sockets = [listen("127.0.0.1", 0, "--port") for _ in range(2)]
    ports = [sock.getsockname()[1] for sock in sockets]
    listeners = [Listener(parts.public, sockets[0]), Listener(parts.admin, sockets[1])]
    tasks = [asyncio.create_task(parts.run()), *(asyncio.create_task(one.run_on_socket()) for one in listeners)]
    # Nothing here speaks TLS, and reading the authorities' certificates takes longer than most tests.
    clients = [
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False, verify=False)
        for port in ports
    ]
    service = Service(parts, clients[0], clients[1], ports[0])
    try:
        await service.until(lambda _: all(one.started for one in listeners))
        if settled:
            await service.until(lambda fleet: len(fleet.ready()) == len(engines) and fleet.settled())
        yield service
    finally:
        for client in clients:
            await client.aclose()
        for one in listeners:
            one.should_exit = True
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await parts.close()


@asynccontextmanager
async def fakes(*names: str, **options: Any) -> AsyncIterator[list[FakeEngine]]:
    """Engines that can pull from one another."""
    fabric: dict[str, FakeEngine] = {}
    engines = [FakeEngine(engine_id=name, fabric=fabric, **options) for name in names]
    for engine in engines:
        await engine.start()
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.die()

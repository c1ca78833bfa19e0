"""A whole controller in this process, on a real socket, over a launcher that starts nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg_router.config import ClusterConfig
from disagg_router.controller.engine_host import HostSettings
from disagg_router.controller.processes import marked
from disagg_router.controller.run import ControllerParts, run_controller
from disagg_router.errors import ConfigError
from disagg_router.interfaces import Action, Stop
from disagg_router.listening import listen
from disagg_router.model import EngineAddress, EngineCommand, Fingerprint, InstanceSpec
from disagg_router.routing.clock import MonotonicClock
from tests.controller.support import FakeLauncher, spec
from tests.e2e.serving import free_port

CONFIG = ClusterConfig.model_validate({"model": {"served_name": "tiny"}})


class SlowLauncher(FakeLauncher):
    """Engines end when `stopping` has been seen and `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.lifelines: Sequence[int] = ()
        self.stopping, self.go = asyncio.Event(), asyncio.Event()
        self.closed = False

    async def apply(self, action: Action) -> None:
        if isinstance(action, Stop):
            self.stopping.set()
            await self.go.wait()
        await super().apply(action)

    def close(self) -> None:
        self.closed = True


class Running:
    """`task` ends with the controller."""

    def __init__(self, port: int) -> None:
        self.cluster = f"test-{uuid.uuid4().hex[:8]}"
        self.launcher = SlowLauncher()
        self.url = f"http://127.0.0.1:{port}"
        parts = ControllerParts(self._connect, self._build, self._healthy, lambda _: Fingerprint(), MonotonicClock())
        specs = [spec("decode-0", cluster=self.cluster)]
        self.task = asyncio.create_task(run_controller(CONFIG, self.cluster, specs, parts, host="127.0.0.1", port=port))

    def _connect(self, cluster: str, count: int, settings: HostSettings) -> SlowLauncher:
        return self.launcher

    def _build(self, spec: InstanceSpec, address: EngineAddress, incarnation: str) -> EngineCommand:
        return EngineCommand((spec.python,), {})

    async def _healthy(self, url: str) -> bool:
        return True

    async def fleet(self, http: httpx.AsyncClient, **query: int) -> dict[str, Any]:
        """Asked again until the socket is there."""
        while True:
            try:
                return (await http.get(f"{self.url}/fleet", params=query)).json()
            except httpx.ConnectError:
                await asyncio.sleep(0.05)

    async def until_ready(self, http: httpx.AsyncClient) -> None:
        """Asked by long poll."""
        seen: dict[str, Any] = await self.fleet(http)
        while [one["state"] for one in seen["instances"]] != ["ready"]:
            seen = await self.fleet(http, after=seen["version"])


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    monkeypatch.setenv("DISAGG_ROUTER_STATE_DIR", str(tmp_path))
    return free_port()


async def test_a_router_that_waits_is_answered_when_the_engines_are_gone(port: int) -> None:
    """Told that they drain, then left to wait while they end, then let go with the API; nothing is left."""
    running = Running(port)
    async with asyncio.timeout(20), httpx.AsyncClient(timeout=15, trust_env=False) as http:
        await running.until_ready(http)
        os.kill(os.getpid(), signal.SIGTERM)
        await running.launcher.stopping.wait()
        seen = await running.fleet(http)
        assert seen["instances"][0]["state"] == "draining"
        waiting = asyncio.create_task(running.fleet(http, after=seen["version"]))
        os.kill(os.getpid(), signal.SIGINT)  # a second signal changes nothing
        await asyncio.sleep(0.3)
        assert not waiting.done()
        running.launcher.go.set()
        assert (await waiting)["version"] == seen["version"]
        await running.task
    assert running.launcher.running == {}
    assert running.launcher.closed
    assert marked(running.cluster) == []


async def test_a_port_in_use_is_wrong_use(port: int) -> None:
    """The same sentence as the router's, before anything is started."""
    with listen("127.0.0.1", port, "--port"):
        running = Running(port)
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port} \(.*\): choose another with --port"):
            await running.task
    assert running.launcher.applied == []

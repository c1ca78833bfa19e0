"""What the controller's tests share: specs, a clock that never waits, a launcher without processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from disagg_router.errors import LaunchError
from disagg_router.interfaces import Action, Observed, Start, Stop
from disagg_router.model import EngineAddress, InstanceId, InstanceSpec, Role

ADDRESS = EngineAddress("127.0.0.1", 21001, 21002, 21003, 21004)


def spec(id: str = "decode-0", **changes: Any) -> InstanceSpec:
    fields: dict[str, Any] = {
        "id": InstanceId(id),
        "cluster": "test-cluster",
        "role": Role(id.partition("-")[0]),
        "index": 0,
        "model": "/models/tiny",
        "served_name": "tiny",
        "revision": None,
        "device": "cpu",
        "python": "/venv/bin/python",
        "args": {"max-model-len": 8192, "block-size": 32},
        "env": {},
        "gpus": 0,
        "cpus": "auto",
        "labels": {},
    }
    return InstanceSpec(**{**fields, **changes})


def wait_until(condition: Callable[[], object], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


class FakeClock:
    """Sleeping is instant and moves the time."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.time_s += seconds
        await asyncio.sleep(0)


class FakeLauncher:
    """Starts nothing; `running` holds what is up, `refuse` what cannot be started."""

    def __init__(self) -> None:
        self.running: dict[str, Observed] = {}
        self.applied: list[tuple[str, str]] = []
        self.refuse: dict[str, str] = {}
        self.logs: dict[str, list[str]] = {}

    async def observe(self) -> Iterable[Observed]:
        return list(self.running.values())

    async def apply(self, action: Action) -> None:
        await asyncio.sleep(0)
        self.applied.append((type(action).__name__, action.incarnation))
        if isinstance(action, Stop):
            self.running.pop(action.incarnation, None)
            return
        if action.spec.id in self.refuse:
            raise LaunchError(self.refuse[action.spec.id])
        port = 21000 + 10 * len(self.applied)
        address = EngineAddress("127.0.0.1", port, port + 1, port + 2, port + 3)
        self.running[action.incarnation] = Observed(action.spec.id, action.incarnation, True, address)

    async def log_tail(self, instance: InstanceId, lines: int) -> Sequence[str]:
        return self.logs.get(instance, [])[-lines:]

    def kill(self, id: str, note: str = "killed by SIGKILL") -> str:
        """The instance's process is gone; returns its incarnation."""
        (incarnation,) = (key for key, one in self.running.items() if one.id == id)
        one = self.running[incarnation]
        self.running[incarnation] = Observed(one.id, incarnation, False, one.address, note)
        return incarnation

    def starts(self, id: str) -> int:
        return sum(kind == Start.__name__ and name.startswith(f"{id}-") for kind, name in self.applied)

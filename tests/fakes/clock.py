"""A clock that moves when the test says so."""

from __future__ import annotations

import asyncio


class FakeClock:
    """`advance` lets every sleeper whose time has come run before it returns."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def now_s(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleepers.append((self._now_s + seconds, woken))
        await woken.wait()

    async def advance(self, seconds: float) -> None:
        until_s = self._now_s + seconds
        await settle()
        while due := sorted((s for s in self._sleepers if s[0] <= until_s), key=lambda s: s[0]):
            first = due[0]
            self._sleepers.remove(first)
            self._now_s = first[0]
            first[1].set()
            await settle()
        self._now_s = until_s


async def settle() -> None:
    """Let everything that can run do so."""
    for _ in range(30):
        await asyncio.sleep(0)

"""The latest fleet snapshot, and waiting for the next one."""

from __future__ import annotations

import asyncio

from disagg_router.model import FleetSnapshot, Instance


class FleetFeed:
    """Written by the loop, read by the API."""

    def __init__(self, first_version: int = 1) -> None:
        self._snapshot = FleetSnapshot(first_version, ())
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def snapshot(self) -> FleetSnapshot:
        return self._snapshot

    def publish(self, instances: tuple[Instance, ...]) -> None:
        """A new version, unless nothing changed."""
        if instances != self._snapshot.instances:
            self._snapshot = FleetSnapshot(self._snapshot.version + 1, instances)
            self._wake()

    def close(self) -> None:
        """Nobody waits from now on."""
        self._closed = True
        self._wake()

    async def after(self, version: int | None, limit_s: float) -> FleetSnapshot:
        """The snapshot as soon as its version is another than `version`, at the latest after `limit_s`.

        Another, not a greater one: a reader may hold a version of a controller that is gone.
        """
        deadline_s = asyncio.get_running_loop().time() + limit_s
        while self._snapshot.version == version and not self._closed:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                break
        return self._snapshot

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

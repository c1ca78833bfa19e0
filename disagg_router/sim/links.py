"""Transfers between instances: each gets the smaller fair share of its source's egress and its sink's ingress."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable


class Transfer:
    __slots__ = ("_done", "left_bytes", "rate", "sink", "source")

    def __init__(self, source: str, sink: str, moved_bytes: float, done: Callable[[], None]) -> None:
        self.source, self.sink, self.left_bytes, self._done = source, sink, moved_bytes, done
        self.rate = 0.0

    def finish(self) -> None:
        self._done()


class Links:
    """A fluid model. `bytes_per_s` is of each instance in each direction; inf moves everything at once."""

    def __init__(self, bytes_per_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._bytes_per_s, self.loop = bytes_per_s, loop
        self._active: dict[Transfer, None] = {}
        self._as_of_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, source: str, sink: str, moved_bytes: float, done: Callable[[], None]) -> Transfer:
        """`done` is called when all of it has arrived, never before this returns."""
        self._advance()
        transfer = Transfer(source, sink, moved_bytes, done)
        self._active[transfer] = None
        self._share()
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        if transfer in self._active:
            self._advance()
            del self._active[transfer]
            self._share()

    def _advance(self) -> None:
        now_s = self.loop.time()
        passed_s, self._as_of_s = now_s - self._as_of_s, now_s
        if passed_s > 0:
            for transfer in self._active:
                transfer.left_bytes -= transfer.rate * passed_s

    def _share(self) -> None:
        """Rates anew, and a timer for the first that ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._active:
            return
        leaving = Counter(transfer.source for transfer in self._active)
        entering = Counter(transfer.sink for transfer in self._active)
        first_s = math.inf
        for transfer in self._active:
            transfer.rate = self._bytes_per_s / max(leaving[transfer.source], entering[transfer.sink])
            first_s = min(first_s, max(0.0, transfer.left_bytes) / transfer.rate)
        self._timer = self.loop.call_later(first_s, self._first_ended)

    def _first_ended(self) -> None:
        self._timer = None
        self._advance()
        # What is left of rounding is far less than a byte's time.
        ended = [t for t in self._active if t.left_bytes <= t.rate * 1e-9 or t.rate == math.inf]
        for transfer in ended:
            del self._active[transfer]
        self._share()
        for transfer in ended:
            transfer.finish()

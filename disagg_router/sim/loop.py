"""An event loop whose time is virtual: it jumps to the next timer as soon as nothing else is left to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingToDo(RuntimeError):
    """Everybody waits for somebody else: on a real clock this would hang for ever."""


class _Selector(selectors.SelectSelector):
    """Never waits: the time that it was told to wait has passed when it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingToDo("every task of the simulation waits for another")
        if timeout > 0:
            self.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """For simulations only: no sockets, no threads, no signals, whose answers would never be looked for."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self.error: BaseException | None = None  # of a callback: it stops the loop
        self.set_exception_handler(self._failed)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Others would wait for ever for what a timer was to do, while the error is but a line of a log."""
        if "handle" in context and self.error is None:
            self.error = context.get("exception")
            self.stop()
        else:
            self.default_exception_handler(context)

    def time(self) -> float:
        return self._virtual.now_s


class VirtualClock:
    """A Clock on a virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Raises NothingToDo when nothing could ever happen again, and whatever a callback of the loop raises."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            return runner.run(main)
        except RuntimeError:  # among others: the loop was stopped
            if loop.error is not None:
                raise loop.error from None
            raise

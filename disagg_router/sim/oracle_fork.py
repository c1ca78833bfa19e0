"""A process that splits: the same state, as often as one likes, each copy going its own way to its own answer."""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import dataclass, field
from typing import NoReturn

READ_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Copy:
    """In a copy: the how manieth it is, and where its answer goes. It must end by `answer` or `give_up` and never
    return to what its original had begun."""

    number: int
    descriptor: int

    def answer(self, data: bytes) -> NoReturn:
        try:
            os.write(self.descriptor, data)  # far less than a pipe holds
        finally:
            os._exit(0)  # what is to be flushed or closed at an exit is the original's

    def give_up(self) -> NoReturn:
        os._exit(1)


@dataclass(slots=True)
class _Running:
    number: int
    pid: int
    ends_s: float
    said: bytearray = field(default_factory=bytearray)


def split(count: int, *, at_once: int, limit_s: float) -> Copy | list[bytes]:
    """Returns `count` + 1 times: once in each copy, and in the original, when all of them have ended, with their
    answers in order. Who gave up or took more than `limit_s` on the real clock has answered nothing."""
    answers = [b""] * count
    running: dict[int, _Running] = {}
    begun = 0
    try:
        while begun < count or running:
            while begun < count and len(running) < at_once:
                if (copy := _begin(begun, limit_s, running)) is not None:
                    return copy
                begun += 1
            for one in _ended(running):
                answers[one.number] = bytes(one.said)
    except BaseException:
        for descriptor in list(running):
            _end(descriptor, running)
        raise
    return answers


def _begin(number: int, limit_s: float, running: dict[int, _Running]) -> Copy | None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        return Copy(number, writing)
    os.close(writing)
    running[reading] = _Running(number, pid, time.monotonic() + limit_s)
    return None


def _ended(running: dict[int, _Running]) -> list[_Running]:
    """Waits for something to happen."""
    left_s = min(one.ends_s for one in running.values()) - time.monotonic()
    ready, _, _ = select.select(list(running), [], [], max(0.0, left_s))
    ended = []
    for descriptor in ready:
        data = os.read(descriptor, READ_BYTES)
        running[descriptor].said += data
        if not data:
            ended.append(_end(descriptor, running))
    for descriptor in [d for d, one in running.items() if one.ends_s <= time.monotonic()]:
        running[descriptor].said.clear()
        ended.append(_end(descriptor, running))
    return ended


def _end(descriptor: int, running: dict[int, _Running]) -> _Running:
    """It has closed its end, so it is as good as dead, or it has to be."""
    one = running.pop(descriptor)
    os.close(descriptor)
    os.kill(one.pid, signal.SIGKILL)
    os.waitpid(one.pid, 0)
    return one

"""What requests hold: one lease per leg, released exactly once at its own time."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from types import TracebackType

from disagg_router.model import Target, TargetLoad


class LeaseKind(StrEnum):
    PREFILL = "prefill"  # until the prefill answers
    HANDOFF = "handoff"  # link and prefill-side KV: until the decode leg's first byte
    DECODE = "decode"  # decode KV: until the end


class Lease:
    """Held by whoever entered it; releasing twice is harmless and counts once."""

    __slots__ = ("_book", "_held", "_key")

    def __init__(self, book: LeaseBook, key: tuple[LeaseKind, Target]) -> None:
        self._book, self._key, self._held = book, key, True
        book.add(key, 1)

    def release(self) -> None:
        if self._held:
            self._held = False
            self._book.add(self._key, -1)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class LeaseBook:
    """This router's own leases, counted per target."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[LeaseKind, Target]] = Counter()

    def add(self, key: tuple[LeaseKind, Target], change: int) -> None:
        self._counts[key] += change
        if not self._counts[key]:
            del self._counts[key]  # a target that is gone leaves nothing behind

    def take(self, kind: LeaseKind, target: Target) -> Lease:
        return Lease(self, (kind, target))

    def load(self, target: Target) -> TargetLoad:
        return TargetLoad(
            prefills=self._counts[LeaseKind.PREFILL, target],
            handoffs=self._counts[LeaseKind.HANDOFF, target],
            decodes=self._counts[LeaseKind.DECODE, target],
        )

    def held(self) -> dict[tuple[LeaseKind, Target], int]:
        return dict(self._counts)

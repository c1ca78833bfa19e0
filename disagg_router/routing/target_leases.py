"""What is held on one target, and what its engine says beyond that: the sums behind the leases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from disagg_router.model import Target
from disagg_router.routing.prefill_queue import Batch, PrefillQueue


@dataclass(frozen=True, slots=True)
class Held:
    """How many leases of a kind there are on a target, and the KV bytes they hold there (a prefill's are its
    handoff's or its decode's)."""

    count: int
    kv_bytes: float


class Sum:
    """Of what leases hold; exactly 0 when there are none, whatever was rounded before."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def add(self, amount: float) -> None:
        self.count += 1
        self.total += amount

    def take(self, amount: float) -> None:
        self.count -= 1
        self.total = max(0.0, self.total - amount) if self.count else 0.0


class Link:
    """An instance's egress and ingress; its ranks share it."""

    __slots__ = ("inward", "outward", "targets")

    def __init__(self) -> None:
        self.outward, self.inward = Sum(), Sum()
        self.targets: list[Target] = []


class TargetLeases:
    """What is held on one target. Read by whoever describes the target, written by the book."""

    __slots__ = (
        "answered",
        "awaited",
        "coming",
        "decodes",
        "foreign",
        "foreign_bytes",
        "foreign_tokens",
        "gone",
        "kv_capacity_bytes",
        "link",
        "pinned",
        "prefills",
        "prefills_taken",
        "seen",
        "target",
        "unseen",
    )

    def __init__(self, target: Target, link: Link, complete: Callable[[Batch], None]) -> None:
        self.target, self.link = target, link
        self.prefills = PrefillQueue(complete)
        self.prefills_taken = 0  # ever
        self.pinned = Sum()  # handoffs from here
        self.answered = 0  # of those: prefilled
        self.coming = 0  # handoffs to here
        self.awaited = 0  # of those: not yet prefilled, so nothing of them is here
        self.decodes = Sum()
        self.unseen = 0  # of those: nobody sees their streams
        self.gone = False
        self.clear()

    def clear(self) -> None:
        """Nothing is known of the engine."""
        self.kv_capacity_bytes = math.inf
        self.foreign, self.foreign_bytes, self.foreign_tokens = 0, 0.0, 0.0
        self.seen: tuple[int, float] | None = None  # foreign requests and bytes at the last look

    @property
    def kv_free_bytes(self) -> float:
        held_bytes = self.decodes.total + self.pinned.total + self.foreign_bytes
        return max(0.0, self.kv_capacity_bytes - held_bytes)

    @property
    def idle(self) -> bool:
        return not (len(self.prefills) or self.pinned.count or self.coming or self.decodes.count)

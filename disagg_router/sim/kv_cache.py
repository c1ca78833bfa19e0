"""The KV blocks of a simulated instance: those in use, and full ones that stay cached until their space is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from disagg_router.sim.jobs import KvEvents

Keys = Sequence[int]


class Held:
    """One job's blocks: full ones by their keys, in order from the prompt's start, and `private` ones not full yet."""

    __slots__ = ("keys", "private")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.private = 0

    def __len__(self) -> int:
        return len(self.keys) + self.private


class KvCache:
    """Least recently freed blocks go first, and of one job's its last ones, as in vLLM. Equal content is one block."""

    def __init__(self, capacity_blocks: int, events: KvEvents) -> None:
        self.capacity_blocks, self._events = capacity_blocks, events
        self._users: dict[int, int] = {}  # key -> jobs that hold the block
        self._free: OrderedDict[int, None] = OrderedDict()  # cached and held by nobody, the oldest first
        self._private = 0

    @property
    def used_blocks(self) -> int:
        return len(self._users) + self._private

    @property
    def free_blocks(self) -> int:
        return self.capacity_blocks - self.used_blocks

    def cached_blocks(self, keys: Keys) -> int:
        """How many of these, from the first one on, are here."""
        for place, key in enumerate(keys):
            if key not in self._users and key not in self._free:
                return place
        return len(keys)

    def has_room(self, cached: Keys, blocks: int) -> bool:
        """For so many blocks besides these cached ones, of which nobody may hold some: they aren't free then."""
        return blocks <= self.free_blocks - sum(key in self._free for key in cached)

    def take(self, held: Held, keys: Keys) -> None:
        """These are held by one more job from now on."""
        for key in keys:
            self._free.pop(key, None)
            self._users[key] = self._users.get(key, 0) + 1
        held.keys += keys

    def allocate(self, held: Held, blocks: int) -> bool:
        """So many more blocks, or none at all and False."""
        if blocks > self.free_blocks:
            return False
        self._private += blocks
        held.private += blocks
        if (over := self.used_blocks + len(self._free) - self.capacity_blocks) > 0:
            self._events.removed([self._free.popitem(last=False)[0] for _ in range(over)])
        return True

    def fill(self, held: Held, keys: Keys, contents: Keys) -> None:
        """The job's next private blocks are full now and can be found by these keys."""
        # Whatever is new is new to the end: a block's key holds all that comes before it.
        start, first = len(held.keys), self.cached_blocks(keys)
        self.take(held, keys)
        held.private -= len(keys)
        self._private -= len(keys)
        if first < len(keys):
            parent = held.keys[start + first - 1] if start + first else None
            self._events.stored(keys[first:], parent, contents[first:])

    def release(self, held: Held) -> None:
        for key in reversed(held.keys):
            if self._users[key] == 1:
                del self._users[key]
                self._free[key] = None
            else:
                self._users[key] -= 1
        self._private -= held.private
        held.keys, held.private = [], 0

"""One state per target or pair, and an immutable picture of each, made anew a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from types import MappingProxyType
from typing import Generic, TypeVar

K = TypeVar("K")  # what a state belongs to
S = TypeVar("S")  # the state
P = TypeVar("P")  # its picture

FRESH_S = 1.0  # a picture older than this is made anew,
AT_ONCE = 32  # so many of them in one go
MOST = 4096  # states; only what is reported after `forget` could make them more than the fleet has


class States(Generic[K, S, P]):
    """Copy on write: `pictures` gives the same mapping until one of them is made anew, and no mapping ever changes."""

    def __init__(self, make: Callable[[], S], draw: Callable[[K, S, float], P]) -> None:
        """`draw(key, state, now_s)`."""
        self._make = make
        self._draw = draw
        self._states: dict[K, S] = {}
        self._changed: dict[K, None] = {}
        self._drawn_s: dict[K, float] = {}  # oldest first
        self._pictures: Mapping[K, P] = MappingProxyType({})

    def __iter__(self) -> Iterator[K]:
        return iter(self._states)

    def all(self) -> Iterable[S]:
        return self._states.values()

    def change(self, key: K) -> S:
        """The state of `key`, about to be changed."""
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= MOST:
                self.forget([next(iter(self._states))])
            state = self._states[key] = self._make()
        self._changed[key] = None
        return state

    def forget(self, keys: Iterable[K]) -> None:
        gone = set(keys) & self._states.keys()
        for key in gone:
            del self._states[key]
            self._changed.pop(key, None)
            self._drawn_s.pop(key, None)
        if gone:
            self._pictures = MappingProxyType({k: p for k, p in self._pictures.items() if k not in gone})

    def outdate(self) -> None:
        """What all pictures are made of has changed."""
        self._drawn_s = dict.fromkeys(self._drawn_s, -inf)

    def pictures(self, now_s: float) -> Mapping[K, P]:
        due = self._changed
        for key, drawn_s in self._drawn_s.items():
            if now_s - drawn_s < FRESH_S or len(due) >= AT_ONCE:
                break
            due[key] = None
        if due:
            pictures = dict(self._pictures)
            for key in due:
                pictures[key] = self._draw(key, self._states[key], now_s)
                self._drawn_s.pop(key, None)
                self._drawn_s[key] = now_s
            self._pictures, self._changed = MappingProxyType(pictures), {}
        return self._pictures

"""Which target probably holds which prefix, for targets that publish no KV events: what was sent there lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from disagg_router.model import Target
from disagg_router.routing.prefix_index import CachedTokens

DEFAULT_CAPACITY_TOKENS = 65_536
KEEP_S = 120.0  # as Dynamo's approximate indexer: what others send there is not seen, so old news is no news


class RoutedPrefixes:
    """A guess: nothing is heard of what a target evicts. The same calls give the same answers.

    Each target keeps as many blocks as its cache holds, those last used, none longer than `keep_s`. A block goes
    before the blocks it follows, so what is left of a chain is always a start of it.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        *,
        capacity_tokens: Callable[[Target], int | None] = lambda _: None,
        keep_s: float = KEEP_S,
        max_blocks: int = 100_000,
    ) -> None:
        """`capacity_tokens` of a target, where it is known; `max_blocks` bounds each target (about 120 bytes each)."""
        self._now_s, self._capacity_tokens = now_s, capacity_tokens
        self._keep_s, self._max_blocks = keep_s, max_blocks
        self._used_s: dict[Target, OrderedDict[int, float]] = {}  # block key -> last use; least recently used first

    def routed(self, target: Target, chain: Sequence[int], block_size: int) -> None:
        """The target has computed or pulled a prompt with these blocks."""
        used_s = self._used_s.setdefault(target, OrderedDict())
        now_s = self._now_s()
        tokens = self._capacity_tokens(target) or DEFAULT_CAPACITY_TOKENS
        blocks = max(1, min(self._max_blocks, tokens // block_size))
        for key in reversed(chain[:blocks]):
            used_s[key] = now_s
            used_s.move_to_end(key)
        while len(used_s) > blocks:
            used_s.popitem(last=False)
        self._expire(used_s, now_s)
        if not used_s:
            del self._used_s[target]

    def cached_tokens(self, chain: Sequence[int], block_size: int) -> Mapping[Target, CachedTokens]:
        """As PrefixIndex.cached_tokens. A bisection per target."""
        if not chain:
            return {}
        since_s = self._now_s() - self._keep_s
        held: dict[Target, CachedTokens] = {}
        for target, used_s in self._used_s.items():
            low, high = 0, len(chain)
            while low < high:
                middle = (low + high + 1) // 2
                if used_s.get(chain[middle - 1], -1e300) > since_s:
                    low = middle
                else:
                    high = middle - 1
            if low:
                held[target] = CachedTokens(low * block_size, 0)
        return held

    def forget(self, target: Target) -> None:
        self._used_s.pop(target, None)

    def blocks(self) -> int:
        """Of all targets."""
        return sum(map(len, self._used_s.values()))

    def _expire(self, used_s: OrderedDict[int, float], now_s: float) -> None:
        while used_s and next(iter(used_s.values())) <= now_s - self._keep_s:
            used_s.popitem(last=False)

"""The cache of a simulated engine: what is found, what goes first, and that its events say what it holds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from disagg_router.model import Target
from disagg_router.routing.holdings import GPU
from disagg_router.routing.prefix_index import PrefixIndex
from disagg_router.sim.client import tokens_of
from disagg_router.sim.kv_cache import Held, KvCache
from tests.builders import target
from tests.sim.engines import BLOCK_TOKENS, Heard, content

U0 = target("u0")


def held(cache: KvCache, blocks: Sequence[int], partial: int = 0) -> Held:
    """As a job computes them: what is cached is taken, the rest allocated and filled."""
    one, keys = Held(), content(blocks)
    found = cache.cached_blocks(keys)
    cache.take(one, keys[:found])
    assert cache.allocate(one, len(keys) - found + partial)
    cache.fill(one, keys[found:], blocks[found:])
    return one


def found(cache: KvCache, *blocks: int) -> int:
    return cache.cached_blocks(content(blocks))


def test_what_is_computed_is_found_while_it_is_held_and_after():
    """From the start on, as far as the content is the same; a block that is not full is nobody's."""
    cache = KvCache(10, Heard())
    one = held(cache, [1, 2, 3], partial=1)
    assert (cache.used_blocks, cache.free_blocks, len(one)) == (4, 6, 4)
    assert [found(cache, 1, 2, 3, 4), found(cache, 1, 2, 9), found(cache, 2, 3)] == [3, 2, 0]
    cache.release(one)
    assert (cache.used_blocks, cache.free_blocks, len(one)) == (0, 10, 0)
    assert found(cache, 1, 2, 3) == 3


def test_equal_content_is_one_block():
    """Until the last of its holders lets go, and also where two computed it side by side."""
    cache = KvCache(10, Heard())
    one, other = held(cache, [1, 2, 3]), held(cache, [1, 2, 4])
    assert cache.used_blocks == 4
    cache.release(one)
    assert cache.used_blocks == 3
    first, second = Held(), Held()
    assert cache.allocate(first, 1)
    assert cache.allocate(second, 1)
    assert cache.used_blocks == 5
    cache.fill(first, content([7]), [7])
    cache.fill(second, content([7]), [7])
    assert cache.used_blocks == 4
    for each in (other, first, second):
        cache.release(each)
    assert cache.used_blocks == 0


def test_all_or_nothing():
    """What does not fit changes nothing, cached or not."""
    heard = Heard()
    cache = KvCache(4, heard)
    cache.release(held(cache, [1, 2]))
    one = held(cache, [5, 6])
    assert not cache.allocate(one, 3)
    assert (cache.used_blocks, found(cache, 1, 2), len(one)) == (2, 2, 2)
    assert cache.allocate(one, 2)
    assert (cache.used_blocks, found(cache, 1, 2), heard.keys) == (4, 0, set(content([5, 6])))


@pytest.mark.parametrize(
    ("needed", "first", "second"),
    [
        (0, 3, 2),
        (1, 2, 2),  # of the one freed first the last block
        (2, 1, 2),
        (3, 0, 2),
        (4, 0, 1),
        (5, 0, 0),
    ],
)
def test_the_least_recently_freed_go_first_and_of_a_prompt_its_end(needed: int, first: int, second: int):
    """Three blocks were freed, then two."""
    cache = KvCache(5, Heard())
    one, other = held(cache, [1, 2, 3]), held(cache, [11, 12])
    cache.release(one)
    cache.release(other)
    assert cache.allocate(Held(), needed)
    assert (found(cache, 1, 2, 3), found(cache, 11, 12)) == (first, second)


def test_use_makes_young():
    """The first prompt is used again, so the second goes."""
    cache = KvCache(4, Heard())
    cache.release(held(cache, [1, 2]))
    cache.release(held(cache, [11, 12]))
    cache.release(held(cache, [1, 2]))
    assert cache.allocate(Held(), 2)
    assert (found(cache, 1, 2), found(cache, 11, 12)) == (2, 0)


@pytest.mark.parametrize(("cached", "fits"), [([], 3), ([11], 3), ([1, 2], 1)])
def test_room_beside_what_is_found(cached: list[int], fits: int):
    """A cached block that nobody holds stops being free when it is taken, one that is held was not."""
    cache = KvCache(5, Heard())
    cache.release(held(cache, [1, 2]))
    held(cache, [11, 12])
    assert cache.has_room(content(cached), fits)
    assert not cache.has_room(content(cached), fits + 1)


class Naive:
    """The same, spelled out: blocks by key in one list from the least to the most recently freed."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.free = capacity, list[int]()
        self.users: dict[int, int] = {}
        self.private = 0

    def begin(self, keys: Sequence[int], partial: int) -> bool:
        """A whole job's keys and its partial blocks."""
        cached = [key for key in keys if key in self.users or key in self.free]
        new = [key for key in keys if key not in cached]
        left = [key for key in self.free if key not in cached]
        room = self.capacity - len(self.users) - self.private - sum(key in self.free for key in cached)
        if len(new) + partial > room:
            return False
        self.free = left[max(0, len(new) + partial - (room - len(left))) :]
        self.private += partial
        for key in keys:
            self.users[key] = self.users.get(key, 0) + 1
        return True

    def end(self, keys: Sequence[int], partial: int) -> None:
        self.private -= partial
        for key in reversed(keys):
            self.users[key] -= 1
            if not self.users[key]:
                del self.users[key]
                self.free.append(key)


@pytest.mark.parametrize("seed", range(5))
def test_random_jobs(seed: int):
    """2,000 of them that share prefixes: block for block as the list says, and as the events say."""
    rng, heard = random.Random(seed), Heard()
    cache, naive = KvCache(60, heard), Naive(60)
    open_: list[tuple[Held, list[int], int]] = []
    begun = 0
    for _ in range(2000):
        if open_ and rng.random() < 0.5:
            one, keys, partial = open_.pop(rng.randrange(len(open_)))
            cache.release(one)
            naive.end(keys, partial)
        else:
            # Four trees of prompts: the first blocks are shared, the later ones the more seldom.
            blocks = [rng.randrange(1 + depth // 3) + 100 * depth for depth in range(rng.randrange(1, 16))]
            blocks[0], partial = rng.randrange(4), rng.randrange(2)
            keys = content(blocks)
            cached = cache.cached_blocks(keys)
            fits = cache.has_room(keys[:cached], len(keys) - cached + partial)
            assert naive.begin(keys, partial) is fits
            if fits:
                open_.append((held(cache, blocks, partial), keys, partial))
                begun += 1
        assert cache.used_blocks == len(naive.users) + naive.private
        assert heard.keys == naive.users.keys() | set(naive.free)
    assert begun > 500


def test_the_routers_index_follows_the_events():
    """Every prompt of a random traffic is predicted to be cached exactly as far as it is."""
    index, rng = PrefixIndex(100_000), random.Random(3)
    cache = KvCache(80, Published(index, U0))
    for _ in range(1000):
        blocks = [rng.randrange(5), *(rng.randrange(2) + 10 * depth for depth in range(rng.randrange(1, 20)))]
        keys = content(blocks)
        predicted = index.cached_tokens(keys, BLOCK_TOKENS).get(U0)
        assert (predicted.gpu_tokens if predicted else 0) == cache.cached_blocks(keys) * BLOCK_TOKENS
        cache.release(held(cache, blocks))
    stats = index.stats()
    assert stats.hits > 100
    assert sum(stats.dropped.values()) == stats.gappy_targets == 0


class Published:
    """Events, straight into an index."""

    def __init__(self, index: PrefixIndex, of: Target) -> None:
        self._index, self._of = index, of

    def stored(self, keys: Sequence[int], parent: int | None, blocks: Sequence[int]) -> None:
        tokens = tokens_of(blocks, BLOCK_TOKENS)
        self._index.stored(self._of, keys, parent, tokens, BLOCK_TOKENS, medium=GPU)

    def removed(self, keys: Sequence[int]) -> None:
        self._index.removed(self._of, keys)

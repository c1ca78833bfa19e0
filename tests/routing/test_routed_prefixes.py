"""What was sent where lately, as a guess of what is cached there."""

from __future__ import annotations

import random

import pytest

from disagg_router.routing.routed_prefixes import RoutedPrefixes
from disagg_router.routing.token_hashes import chain
from tests.builders import target

A, B = target("d0"), target("d1")


class World:
    def __init__(self, **given):
        self.now_s = 0.0
        self.routed = RoutedPrefixes(lambda: self.now_s, **given)

    def send(self, where, prompt, block_size=4):
        self.routed.routed(where, chain(prompt, block_size), block_size)

    def held(self, prompt, block_size=4):
        found = self.routed.cached_tokens(chain(prompt, block_size), block_size)
        return {where: cached.gpu_tokens for where, cached in found.items()}


def test_the_longest_common_start_is_found():
    """In whole blocks, per target."""
    world = World()
    world.send(A, range(12))
    world.send(B, range(6))
    assert world.held(range(16)) == {A: 12, B: 4}
    assert world.held([*range(8), 0, 0, 0, 0]) == {A: 8, B: 4}
    assert world.held([9, 9, 9, 9]) == {}
    assert world.held([]) == {}


@pytest.mark.parametrize(("size", "expected"), [(4, {A: 8}), (8, {})])
def test_another_block_size_finds_nothing(size, expected):
    """Its keys are others."""
    world = World()
    world.send(A, range(8), 4)
    assert world.held(range(8), size) == expected


def test_old_news_is_no_news():
    """Nothing is heard of what was evicted since; a use makes it new."""
    world = World(keep_s=10)
    world.send(A, range(8))
    world.now_s = 6
    world.send(A, range(4))
    world.now_s = 12
    assert world.held(range(8)) == {A: 4}
    world.now_s = 17
    assert world.held(range(8)) == {}
    world.send(A, [7] * 4)
    assert world.routed.blocks() == 1


def test_a_target_keeps_what_its_cache_holds():
    """The ends of what was used longest ago go first."""
    world = World(capacity_tokens={A: 16, B: None}.get)
    world.send(A, range(12))
    world.send(A, [5] * 8)
    assert world.held(range(12)) == {A: 8}
    assert world.held([5] * 8) == {A: 8}
    world.send(A, range(100, 200))
    assert (world.held(range(100, 200)), world.routed.blocks()) == ({A: 16}, 4)


def test_blocks_per_target_are_bounded():
    """However large a cache it claims."""
    world = World(capacity_tokens=lambda _: 10**9, max_blocks=10)
    for start in range(20):
        world.send(A, range(start * 100, start * 100 + 40))
    assert world.routed.blocks() == 10


def test_a_forgotten_target_holds_nothing():
    """It is another process now."""
    world = World()
    world.send(A, range(8))
    world.routed.forget(A)
    world.routed.forget(B)
    assert (world.held(range(8)), world.routed.blocks()) == ({}, 0)


def test_what_is_kept_of_a_prompt_is_always_a_start_of_it():
    """Random conversations with shared starts: the bisection finds what a walk finds."""
    rng, world = random.Random(2), World(capacity_tokens=lambda _: 200, keep_s=20)
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(80))] for _ in range(60)]
    for _ in range(600):
        world.now_s += rng.random()
        world.send(rng.choice([A, B]), rng.choice(prompts))
        prompt = rng.choice(prompts)
        keys, found = chain(prompt, 4), world.held(prompt)
        for where in (A, B):
            walked = 0
            while walked < len(keys) and world.routed.cached_tokens([keys[walked]], 4).get(where):
                walked += 1
            assert found.get(where, 0) == walked * 4

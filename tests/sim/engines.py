"""Simulated engines with round figures, and what tests ask of them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pytest

from disagg_router.routing.token_hashes import chain
from disagg_router.sim.client import tokens_of
from disagg_router.sim.instance import Handoffs, SimInstance
from disagg_router.sim.jobs import Job, Timings
from disagg_router.sim.links import Links
from disagg_router.sim.loop import VirtualLoop, run
from disagg_router.sim.scheduler import Room

T = TypeVar("T")
BLOCK_TOKENS = 10
KV_BYTES_PER_TOKEN = 1000.0


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """A step takes 10 ms, 0.1 ms per prompt token and 1 ms per stream, and `context_s` per token of their contexts."""

    context_s: float = 0.0

    def step_s(self, chunks: Sequence[tuple[int, int]], running: int, context_tokens: float) -> float:
        return 0.01 + 1e-4 * sum(new for new, _ in chunks) + 1e-3 * running + self.context_s * context_tokens


@dataclass(slots=True)
class Heard:
    """KV events, replayed into what they say is cached. Nothing may be stored or removed twice, nor follow nothing."""

    keys: set[int] = field(default_factory=set)
    stored_blocks: int = 0

    def stored(self, keys: Sequence[int], parent: int | None, blocks: Sequence[int]) -> None:
        assert len(keys) == len(blocks) > 0
        assert parent is None or parent in self.keys
        assert self.keys.isdisjoint(keys)
        self.keys.update(keys)
        self.stored_blocks += len(keys)

    def removed(self, keys: Sequence[int]) -> None:
        assert self.keys.issuperset(keys)
        self.keys.difference_update(keys)


def content(blocks: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> list[int]:
    """Keys of full blocks with these content ids."""
    return chain(tokens_of(blocks, block_tokens), block_tokens)


def job(number: int, prompt: int, output: int = 1, *, blocks: Sequence[int] | None = None, pinned: bool = False) -> Job:
    """On a running loop. Without `blocks` it shares its content with nobody; else they are its first ones."""
    full = (prompt + output) // BLOCK_TOKENS
    own = [*(blocks or ()), *range(number * 10_000, number * 10_000 + full)][:full]
    return Job(number, prompt_tokens=prompt, output_tokens=output, blocks=own, keys=content(own), pinned=pinned)


class Bench:
    """Engines on one virtual loop. `links`: 1 MB/s, a second for 1,000 tokens."""

    def __init__(self, loop: VirtualLoop, bytes_per_s: float = 1e6) -> None:
        self.loop = loop
        self.links = Links(bytes_per_s, loop)

    def engine(
        self,
        name: str = "u0",
        *,
        timings: Timings | None = None,
        chunk_tokens: int | None = 1000,
        kv_tokens: int = 1_000_000,
        handoff_s: float = 0.0,
        lease_s: float = 30.0,
        events: Any = None,
        noise_sd: float = 0.0,
        seed: int = 1,
    ) -> SimInstance:
        return SimInstance(
            name,
            timings=timings or RoundTimings(),
            room=Room(chunk_tokens, kv_tokens, BLOCK_TOKENS),
            handoffs=Handoffs(KV_BYTES_PER_TOKEN, handoff_s, lease_s),
            links=self.links,
            events=events or Heard(),
            loop=self.loop,
            rng=random.Random(seed),
            noise_sd=noise_sd,
        )

    def at(self, when_s: float, call: Callable[..., object], *args: object) -> None:
        self.loop.call_at(when_s, call, *args)


def virtually(scenario: Callable[[Bench], Awaitable[T]], bytes_per_s: float = 1e6) -> T:
    """What it returns, on a loop of its own."""
    loop = VirtualLoop()

    async def main() -> T:
        return await scenario(Bench(loop, bytes_per_s))

    return run(main(), loop)


def holds_nothing(engine: SimInstance) -> bool:
    """Nobody is here any more, and every block is free, be it cached or not."""
    scheduler = engine.scheduler
    queues = (scheduler.running, scheduler.waiting, scheduler.pulling)
    sums = (scheduler.streams, scheduler.context_tokens, scheduler.cache.used_blocks)
    return not any(queues) and sums == (0, 0, 0)


class Times(NamedTuple):
    first_s: float
    last_s: float
    max_gap_s: float


def times(one: Job) -> Times:
    assert one.tokens == one.output_tokens
    return Times(one.first_s, one.last_s, one.max_gap_s)


def near(*expected: tuple[float, float, float]) -> list[object]:
    return [pytest.approx(one, rel=1e-9, abs=1e-12) for one in expected]

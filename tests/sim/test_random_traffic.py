"""Two simulated engines under far more than they have memory for: what must hold does, at every step and at the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest

from disagg_router.sim.instance import Pull, SimInstance
from disagg_router.sim.jobs import Job
from disagg_router.sim.loop import NothingToDo
from tests.sim.engines import Bench, Heard, RoundTimings, holds_nothing, job, virtually


class Traffic:
    """Random requests on two engines with little memory, which hand prompts to each other. Some clients go."""

    def __init__(self, bench: Bench, rng: random.Random, chunk_tokens: int | None) -> None:
        self.bench, self.rng = bench, rng
        self.heard = [Heard(), Heard()]
        self.engines = [
            bench.engine(
                f"u{place}",
                timings=Checked(self.check),
                chunk_tokens=chunk_tokens,
                kv_tokens=2000,
                handoff_s=0.005,
                lease_s=2.0,
                events=heard,
            )
            for place, heard in enumerate(self.heard)
        ]
        self.numbers = self.done = self.gone = 0

    async def client(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, 60))
        prompt, output = self.rng.randrange(1, 900), self.rng.randrange(1, 300)
        talk = 1000 * self.rng.randrange(3)  # three conversations, whose first blocks are the same for all
        blocks = range(talk, talk + self.rng.randrange(60))
        here, there = self.rng.sample(self.engines, 2)
        try:
            async with asyncio.timeout(self.rng.choice([self.rng.uniform(0, 3), 1e6, 1e6, 1e6, 1e6])):
                pull = None
                if self.rng.random() < 0.5:
                    leg = self._job(prompt, 1, blocks, pinned=True)
                    await self._leg(there, leg, None)
                    pull = Pull(there, leg.number)
                    if self.rng.random() < 0.1:
                        return  # nobody comes for it
                await self._leg(here, self._job(prompt, output, blocks), pull)
                self.done += 1
        except TimeoutError:
            self.gone += 1

    async def _leg(self, engine: SimInstance, one: Job, pull: Pull | None) -> None:
        try:
            engine.submit(one, pull)
            self.check()
            await asyncio.shield(one.done)
            assert one.tokens == one.output_tokens
            assert one.first_s <= one.last_s
            assert one.cached_tokens < one.prompt_tokens
        finally:
            if not one.done.done():
                engine.abort(one)
                self.check()

    def _job(self, prompt: int, output: int, blocks: Sequence[int], *, pinned: bool = False) -> Job:
        self.numbers += 1
        return job(self.numbers, prompt, output, blocks=blocks, pinned=pinned)

    def check(self) -> None:
        for engine, heard in zip(self.engines, self.heard, strict=True):
            scheduler, cache = engine.scheduler, engine.scheduler.cache
            decoding = [one for one in scheduler.running.values() if one.decoding]
            assert scheduler.streams == len(decoding)
            assert scheduler.context_tokens == sum(one.computed_tokens for one in decoding)
            here = [*scheduler.running.values(), *scheduler.pulling.values()]
            assert all(len(one.held) * 10 >= one.computed_tokens for one in here)
            assert not any(len(one.held) for one in scheduler.waiting)
            assert len({one for sequence in here for one in sequence.held.keys}) <= cache.used_blocks
            assert cache.used_blocks <= cache.capacity_blocks
            assert len(heard.keys) <= cache.capacity_blocks
            assert all(heard.keys.issuperset(one.held.keys) for one in here)


class Checked:
    """Looks at everything at the beginning of every step."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check, self._timings = check, RoundTimings()

    def step_s(self, chunks: Sequence[tuple[int, int]], running: int, context_tokens: float) -> float:
        self._check()
        return self._timings.step_s(chunks, running, context_tokens)


@pytest.mark.parametrize("chunk_tokens", [64, 512, None])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(seed: int, chunk_tokens: int | None):
    """400 clients, far more than there is memory for: what must hold does at every step, and nothing stays behind."""
    found: list[Traffic] = []

    async def scenario(bench: Bench) -> None:
        traffic = Traffic(bench, random.Random(seed), chunk_tokens)
        found.append(traffic)
        async with asyncio.TaskGroup() as group:
            for _ in range(400):
                group.create_task(traffic.client())
        await asyncio.sleep(2.1)  # the leases of those whom nobody came for
        traffic.check()
        for engine, heard in zip(traffic.engines, traffic.heard, strict=True):
            assert holds_nothing(engine)
            assert all(engine.scheduler.cache.cached_blocks([key]) for key in heard.keys)
        await asyncio.Event().wait()

    with pytest.raises(NothingToDo):
        virtually(scenario)
    assert found[0].gone > 20
    assert found[0].done > 250

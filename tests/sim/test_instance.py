"""A simulated engine in time, by hand arithmetic: 10 ms a step, 0.1 ms per prompt token, 1 ms per stream."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from disagg_router.sim.instance import JUMP_STEPS
from tests.sim.engines import Bench, RoundTimings, Times, holds_nothing, job, near, times, virtually


class Asked(NamedTuple):
    at_s: float
    prompt: int
    output: int


def served(
    *asked: Asked, chunk_tokens: int | None = 1000, context_s: float = 0.0, kv_tokens: int = 10**6
) -> list[Times]:
    """By one engine; prompts share nothing."""

    async def scenario(bench: Bench) -> list[Times]:
        engine = bench.engine(timings=RoundTimings(context_s), chunk_tokens=chunk_tokens, kv_tokens=kv_tokens)
        jobs = [job(number, one.prompt, one.output) for number, one in enumerate(asked)]
        for one, its in zip(asked, jobs, strict=True):
            bench.at(one.at_s, engine.submit, its)
        await asyncio.gather(*(one.done for one in jobs))
        assert holds_nothing(engine)
        return [times(one) for one in jobs]

    return virtually(scenario)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # 10 + 50 ms, then three steps of 11 ms.
        pytest.param([Asked(1, 500, 4)], [(1.06, 1.093, 0.011)], id="alone"),
        pytest.param([Asked(0, 500, 1)], [(0.06, 0.06, 0)], id="one token"),
        # Both prompts in one step of 10 + 20 + 30 ms, then one of 12 ms for two streams.
        pytest.param([Asked(0, 200, 2), Asked(0, 300, 2)], [(0.06, 0.072, 0.012)] * 2, id="two in a step"),
        # 10 + 100 ms; 10 + 100; 10 + 50.
        pytest.param([Asked(0, 2500, 1)], [(0.28, 0.28, 0)], id="in chunks"),
        # The first prompt: 20 ms. It goes on at 31 ms; the second, which came at 25, joins at 31 in chunks of 999, 999
        # and 502 tokens beside one stream: 110.9, 110.9, 61.2 ms. Then both for a step: 12 ms.
        pytest.param(
            [Asked(0, 100, 6), Asked(0.025, 2500, 2)],
            [(0.02, 0.326, 0.1109), (0.314, 0.326, 0.012)],
            id="in chunks beside a stream",
        ),
        # Who comes in the middle of a long run of steps meets their next end: 20 + 11 k >= 500 at k = 44, 504 ms.
        pytest.param(
            [Asked(0, 100, 51), Asked(0.5, 100, 2)],
            [(0.02, 0.504 + 0.021 + 0.012 + 4 * 0.011, 0.021), (0.525, 0.537, 0.012)],
            id="in the middle of a run",
        ),
        # At the very end of a step: in the next one.
        pytest.param(
            [Asked(0, 100, 5), Asked(0.042, 100, 1)],
            [(0.02, 0.02 + 3 * 0.011 + 0.021, 0.021), (0.063, 0.063, 0)],
            id="at the end of a step",
        ),
        # Ends of others change the step: 12 ms for two, then 11 for one.
        pytest.param(
            [Asked(0, 100, 3), Asked(0, 100, 6)], [(0.03, 0.054, 0.012), (0.03, 0.087, 0.012)], id="one ends earlier"
        ),
    ],
)
def test_by_hand(asked: list[Asked], expected: list[tuple[float, float, float]]):
    """First token, last token, longest pause."""
    assert served(*asked) == near(*expected)


def test_whole_prompts_first_while_streams_wait():
    """Without chunks: 10 + 250 ms during which nobody else gets anything."""
    first, second = served(Asked(0, 100, 3), Asked(0.025, 2500, 2), chunk_tokens=None)
    # 20 ms, 31 ms, the pause until 291 ms, then one step for both.
    assert [first, second] == near((0.02, 0.303, 0.272), (0.291, 0.303, 0.012))


def test_contexts_grow():
    """10 us per token of context: the prompt and every token of the answer that the step finds."""
    [one] = served(Asked(0, 100, 5), context_s=1e-5)
    steps = [0.011 + 1e-5 * context for context in (100, 101, 102, 103)]
    assert [one] == near((0.02, 0.02 + sum(steps), steps[-1]))


# --- against a loop that takes every step -----------------------------------------------------------------------


@dataclass(slots=True)
class _One:
    asked: Asked
    computed: int = 0
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    gap_s: float = 0.0

    def told(self, now_s: float) -> None:
        if self.tokens == 0:
            self.first_s = now_s
        else:
            self.gap_s = max(self.gap_s, now_s - self.last_s)
        self.tokens, self.last_s = self.tokens + 1, now_s


def stepped(asked: Sequence[Asked], chunk_tokens: int, context_s: float) -> list[Times]:
    """With memory for everybody."""
    timings, now_s = RoundTimings(context_s), 0.0
    everybody = [_One(one) for one in asked]
    while left := [one for one in everybody if one.tokens < one.asked.output]:
        here = sorted((one for one in left if one.asked.at_s <= now_s + 1e-10), key=lambda one: one.asked.at_s)
        if not here:
            now_s = min(one.asked.at_s for one in left)
            continue
        streams = [one for one in here if one.tokens]
        budget, chunks = chunk_tokens - len(streams), list[tuple[_One, int]]()
        for one in here:
            if not one.tokens and budget > 0:
                tokens = min(budget, one.asked.prompt - one.computed)
                chunks.append((one, tokens))
                budget -= tokens
        context = sum(one.asked.prompt + one.tokens - 1 for one in streams)
        now_s += timings.step_s([(tokens, one.computed) for one, tokens in chunks], len(streams), context)
        for one, tokens in chunks:
            one.computed += tokens
        for one in streams + [one for one, _ in chunks if one.computed == one.asked.prompt]:
            one.told(now_s)
    return [Times(one.first_s, one.last_s, one.gap_s) for one in everybody]


@pytest.mark.parametrize("context_s", [0.0, 1e-6, 1e-4])
@pytest.mark.parametrize("seed", range(4))
def test_many_steps_at_once_are_as_one_by_one(seed: int, context_s: float):
    """Random requests that meet each other in every way, with runs of steps far longer and shorter than a jump."""
    rng, at_s, asked = random.Random(seed), 0.0, list[Asked]()
    for _ in range(60):
        at_s += rng.expovariate(2.0)
        asked.append(Asked(at_s, rng.choice([rng.randrange(1, 300), rng.randrange(300, 5000)]), rng.randrange(1, 200)))
    assert max(one.output for one in asked) > 2 * JUMP_STEPS
    expected = stepped(asked, 1000, context_s)
    assert served(*asked, context_s=context_s) == near(*expected)


# --- what is cached -------------------------------------------------------------------------------------------------


def test_a_cached_prefix_takes_no_time():
    """100 of 105 tokens are there: 10 ms and 5 tokens; of 100 of 100 a block is computed for its last token."""

    async def scenario(bench: Bench) -> list[tuple[float, int]]:
        engine, found = bench.engine(), list[tuple[float, int]]()
        for number, prompt in enumerate((100, 105, 100)):
            one, begun_s = job(number, prompt, blocks=range(10)), bench.loop.time()
            engine.submit(one)
            await one.done
            found.append((one.first_s - begun_s, one.cached_tokens))
        return found

    assert virtually(scenario) == [(pytest.approx(0.02), 0), (pytest.approx(0.0105), 100), (pytest.approx(0.011), 90)]


def test_an_answer_is_cached_too():
    """But for its last token, whose KV nobody computed: 60 and 39 tokens, nine blocks."""

    async def scenario(bench: Bench) -> int:
        engine = bench.engine()
        first, second = job(1, 60, 40, blocks=range(10)), job(2, 200, blocks=range(10))
        for one in (first, second):
            engine.submit(one)
            await one.done
        return second.cached_tokens

    assert virtually(scenario) == 90


# --- memory ---------------------------------------------------------------------------------------------------------


def test_who_gives_way_is_computed_anew():
    """Ten blocks. Two prompts of 45 tokens, in one step of 19 ms, take five each, until the first needs its sixth
    at 51 tokens; the second gives way after six tokens and comes back when the first is done, with 40 of its 51 tokens
    cached but for what the first took in the meantime."""

    async def scenario(bench: Bench) -> tuple[Times, Times, int]:
        engine = bench.engine(kv_tokens=100)
        first, second = job(1, 45, 15), job(2, 45, 15)
        engine.submit(first)
        engine.submit(second)
        await asyncio.gather(first.done, second.done)
        assert holds_nothing(engine)
        return times(first), times(second), second.cached_tokens

    first, second, cached = virtually(scenario)
    # Five steps of 12 ms (tokens 2 to 6, contexts up to 50), then nine of 11 ms alone.
    assert [first] == near((0.019, 0.019 + 5 * 0.012 + 9 * 0.011, 0.012))
    # At 178 ms: 51 tokens less four cached blocks make the seventh token; then eight steps.
    again_s = 0.178 + 0.01 + 11e-4
    assert [second] == near((0.019, again_s + 8 * 0.011, again_s - 0.079))
    assert cached == 0


@pytest.mark.parametrize("chunk_tokens", [50, 1000, None])
def test_prompts_that_fill_everything_end_all(chunk_tokens: int | None):
    """Thirty of them, of which at most two fit at a time, answers longer than prompts."""
    asked = [Asked(number / 1000, 200, 290) for number in range(30)]
    found = served(*asked, chunk_tokens=chunk_tokens, kv_tokens=500)
    assert [one.first_s for one in found] == sorted(one.first_s for one in found)


def test_what_never_fits_is_refused():
    """Prompt and answer together; nothing is left of it."""

    async def scenario(bench: Bench) -> None:
        engine = bench.engine(kv_tokens=100)
        engine.submit(job(1, 90, 10))
        with pytest.raises(RuntimeError, match="91 \\+ 10 tokens do not fit into u0"):
            engine.submit(job(2, 91, 10))
        await asyncio.sleep(10)
        assert holds_nothing(engine)

    virtually(scenario)


# --- noise ------------------------------------------------------------------------------------------------------------


def spread(seed: int, sd: float) -> list[float]:
    """Times of 2,000 prefills of 20 ms."""

    async def scenario(bench: Bench) -> list[float]:
        engine, found = bench.engine(noise_sd=sd, seed=seed), list[float]()
        for number in range(2000):
            one, begun_s = job(number, 100), bench.loop.time()
            engine.submit(one)
            await one.done
            found.append(one.first_s - begun_s)
        return found

    return virtually(scenario)


def test_noise_keeps_the_mean():
    """20 % of a step's time, lognormal: the mean of 2,000 is within four of its standard deviations."""
    found = spread(seed=1, sd=0.2)
    mean_s = sum(found) / len(found)
    sd_s = math.sqrt(sum((one - mean_s) ** 2 for one in found) / len(found))
    assert mean_s == pytest.approx(0.02, abs=4 * 0.004 / math.sqrt(2000))
    assert sd_s == pytest.approx(0.004, rel=0.1)


def test_one_seed_gives_one_run():
    """Bit for bit, and another seed another."""
    assert spread(seed=1, sd=0.2) == spread(seed=1, sd=0.2) != spread(seed=2, sd=0.2)

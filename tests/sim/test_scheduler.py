"""Who is computed next: chunks, room, who gives way. Blocks hold 10 tokens; nothing takes time here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from disagg_router.sim import scheduler as sim
from disagg_router.sim.instance import Pull
from disagg_router.sim.jobs import Job
from disagg_router.sim.loop import VirtualLoop
from disagg_router.sim.scheduler import WHOLE_STEP_TOKENS, Room, Scheduler
from tests.sim.engines import BLOCK_TOKENS, Bench, Heard, job


class Steps:
    """A scheduler that is stepped by hand; every step ends at once, as an instance would end it."""

    def __init__(self, kv_blocks: int = 1000, chunk_tokens: int | None = 100, max_running: int = 256) -> None:
        self.scheduler = Scheduler(Room(chunk_tokens, kv_blocks * BLOCK_TOKENS, BLOCK_TOKENS, max_running), Heard())

    def ask(self, *jobs: Job, pull: Pull | None = None) -> None:
        self.scheduler.waiting.extend(sim.Sequence(one, pull) for one in jobs)

    def next(self) -> list[tuple[int, int]]:
        """(job, tokens) of the chunks; streams, counted as 0 tokens, come first."""
        streams = list(self.scheduler.decoding())
        step = self.scheduler.next()
        streams = [one for one in streams if one.job in self.scheduler.running]
        seen = [(one.job.number, 0) for one in streams] + [(one.job.number, tokens) for one, tokens in step.chunks]
        for stream in streams:
            stream.job.tokens += 1
            self.scheduler.grown(stream, 1)
        for one, tokens in step.chunks:
            self.scheduler.computed(one, tokens)
            one.job.tokens += one.decoding
        self._check()
        return seen

    def _check(self) -> None:
        cache, held = self.scheduler.cache, [*self.scheduler.running.values(), *self.scheduler.pulling.values()]
        assert cache.used_blocks <= cache.capacity_blocks
        assert self.scheduler.streams == len(list(self.scheduler.decoding()))
        assert self.scheduler.context_tokens == sum(one.computed_tokens for one in self.scheduler.decoding())
        assert all(len(one.held) * BLOCK_TOKENS >= one.computed_tokens for one in held)
        assert not any(len(one.held) for one in self.scheduler.waiting)

    def numbers(self, queue: str) -> list[int]:
        return [one.job.number for one in _sequences(self.scheduler, queue)]


def _sequences(scheduler: Scheduler, queue: str) -> Iterator[sim.Sequence]:
    if queue == "waiting":
        return iter(scheduler.waiting)
    return iter((scheduler.running if queue == "running" else scheduler.pulling).values())


@pytest.fixture
def pull() -> Iterator[Pull]:
    """Of a handoff that nobody looks for."""
    with closing(VirtualLoop()) as loop:
        yield Pull(Bench(loop).engine(), 7)


async def test_a_long_prompt_in_chunks_beside_streams():
    """Streams come first and leave the rest of 100 tokens to the prompt; its last chunk makes its first token."""
    steps = Steps()
    steps.ask(job(1, 20, 9), job(2, 30, 9))
    assert steps.next() == [(1, 20), (2, 30)]
    steps.ask(job(3, 250, 9))
    assert steps.next() == [(1, 0), (2, 0), (3, 98)]
    assert steps.next() == [(1, 0), (2, 0), (3, 98)]
    assert steps.next() == [(1, 0), (2, 0), (3, 54)]
    assert steps.next() == [(1, 0), (2, 0), (3, 0)]


async def test_short_prompts_share_a_step():
    """In order, the last one with what is left; the rest of it goes before those that wait."""
    steps = Steps()
    steps.ask(job(1, 40), job(2, 40), job(3, 50), job(4, 10))
    assert steps.next() == [(1, 40), (2, 40), (3, 20)]
    assert steps.next() == [(1, 0), (2, 0), (3, 30), (4, 10)]


async def test_no_more_run_than_may():
    """The third waits, although it would fit."""
    steps = Steps(max_running=2)
    steps.ask(job(1, 10), job(2, 10), job(3, 10))
    assert steps.next() == [(1, 10), (2, 10)]
    assert steps.numbers("waiting") == [3]


async def test_more_streams_than_tokens_of_a_step():
    """Nothing is left for a prompt until some of them end."""
    steps = Steps(chunk_tokens=3)
    steps.ask(*(job(number, 1, 9) for number in (1, 2, 3)))
    assert steps.next() == [(1, 1), (2, 1), (3, 1)]
    steps.ask(job(4, 2))
    assert steps.next() == [(1, 0), (2, 0), (3, 0)]


async def test_whole_prompts_first():
    """Without chunks: together up to 8,192 tokens, a longer one alone, never a part of one."""
    steps = Steps(chunk_tokens=None, kv_blocks=10_000)
    long = WHOLE_STEP_TOKENS
    steps.ask(job(1, long - 100), job(2, 100), job(3, 10), job(4, long + 5), job(5, 1))
    assert steps.next() == [(1, long - 100), (2, 100)]
    assert steps.next() == [(1, 0), (2, 0), (3, 10)]
    assert steps.next() == [(1, 0), (2, 0), (3, 0), (4, long + 5)]
    assert steps.next() == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1)]


@pytest.mark.parametrize(
    ("prompt", "shared", "cached"),
    [
        (100, 0, 0),
        (105, 4, 40),
        (105, 10, 100),
        (100, 10, 90),  # all of it is cached: the last block is computed again for its last token
        (101, 10, 100),
        (10, 1, 0),
    ],
)
async def test_a_cached_prefix(prompt: int, shared: int, cached: int):
    """What is found is not computed, but the last token always is."""
    steps = Steps(chunk_tokens=1000)
    first = job(1, 100, blocks=range(10))
    steps.ask(first)
    steps.next()
    steps.scheduler.remove(first)
    second = job(2, prompt, blocks=range(shared))
    steps.ask(second)
    assert steps.next() == [(2, prompt - cached)]
    assert second.cached_tokens == cached
    assert (steps.scheduler.prompt_tokens, steps.scheduler.cached_tokens) == (100 + prompt, cached)


async def test_prompts_of_one_step_share_their_prefix():
    """The second finds what the first is about to compute, as in vLLM, whose blocks are known once they are given."""
    steps = Steps(chunk_tokens=1000)
    steps.ask(job(1, 100, blocks=range(8)), job(2, 100, blocks=range(8)))
    assert steps.next() == [(1, 100), (2, 20)]
    assert steps.scheduler.cache.used_blocks == 12


async def test_the_first_in_line_waits_for_room_and_all_others_behind_it():
    """Room for all of it, as vLLM wants it (scheduler_reserve_full_isl), and not for its first chunk only."""
    steps = Steps(kv_blocks=30)
    first, second = job(1, 150), job(2, 151)
    steps.ask(first, second, job(3, 10))
    assert steps.next() == [(1, 100)]
    assert steps.next() == [(1, 50)]
    assert steps.numbers("waiting") == [2, 3]
    steps.scheduler.remove(first)
    assert steps.next() == [(2, 100)]


async def test_a_prompt_that_waits_keeps_nothing_young():
    """Its cached prefix is not used until it is let in: it goes in its turn, as if nobody wanted it."""
    steps = Steps(kv_blocks=10)
    old, young, rest = job(1, 30, blocks=[1, 2, 3]), job(2, 30, blocks=[11, 12, 13]), job(3, 40, 9)
    for one in (old, young):
        steps.ask(one)
        steps.next()
        steps.scheduler.remove(one)
    steps.ask(rest)
    steps.next()
    steps.ask(job(4, 90, blocks=[1, 2, 3]))  # six blocks besides its three, and there are three
    for _ in range(3):
        assert steps.next() == [(3, 0)]
    cache = steps.scheduler.cache
    assert (cache.cached_blocks(old.keys), cache.cached_blocks(young.keys)) == (2, 3)


async def test_the_last_that_came_gives_way():
    """Four blocks for two prompts of 18 tokens: the first needs a third at its 21st token, and the second goes, to come
    back with its answer so far as part of its prompt."""
    steps = Steps(kv_blocks=4)
    first, second = job(1, 18, 9), job(2, 18, 9)
    steps.ask(first, second, job(3, 1))
    assert steps.next() == [(1, 18), (2, 18)]
    assert steps.next() == [(1, 0), (2, 0)]
    assert steps.next() == [(1, 0), (2, 0)]
    assert steps.next() == [(1, 0)]
    assert steps.numbers("waiting") == [2, 3]
    steps.scheduler.remove(first)
    # 18 and 3 tokens of its answer; its first block is cached still.
    assert steps.next() == [(2, 11), (3, 1)]
    assert second.cached_tokens == 0
    assert second.tokens == 4


async def test_nobody_comes_in_where_somebody_had_to_go():
    """Not even one for whom there would be room: the one that had to go is before it, and needs more than there is."""
    steps = Steps(kv_blocks=5)
    steps.ask(job(1, 20, 30), job(2, 30, 9))
    assert steps.next() == [(1, 20), (2, 30)]
    assert steps.next() == [(1, 0)]
    steps.ask(job(3, 10))
    assert steps.numbers("waiting") == [2, 3]
    assert steps.next() == [(1, 0)]  # 2 is first in line, and does not fit beside 1
    assert steps.numbers("waiting") == [2, 3]


async def test_who_came_last_goes_itself():
    """It finds no block, and nobody came after it: the others stay, and it is the next to come in."""
    steps = Steps(kv_blocks=4)
    steps.ask(job(1, 15, 5), job(2, 20, 5))
    steps.next()
    assert steps.next() == [(1, 0)]
    assert (steps.numbers("running"), steps.numbers("waiting")) == ([1], [2])


async def test_a_prompt_alone_goes_and_comes_back_at_once():
    """With nobody beside it the step would be empty; it goes on from what is cached of it."""
    steps = Steps(kv_blocks=20)
    steps.ask(job(1, 150))
    assert steps.next() == [(1, 100)]
    blocker = sim.Sequence(job(2, 60), None)  # say a handoff that is kept
    assert steps.scheduler.cache.allocate(blocker.held, 6)
    assert steps.next() == []
    steps.scheduler.cache.release(blocker.held)
    assert steps.next() == [(1, 50)]


async def test_what_was_pulled_computes_its_last_token(pull: Pull):
    """Behind those that run; meanwhile it holds all its blocks, and does not count as running."""
    steps = Steps()
    steps.ask(job(1, 45, 3), pull=pull)
    assert steps.next() == []
    assert (steps.numbers("pulling"), steps.scheduler.cache.used_blocks) == ([1], 5)
    steps.ask(job(2, 20, 3))
    assert steps.next() == [(2, 20)]
    steps.scheduler.pulled(next(iter(steps.scheduler.pulling.values())))
    assert steps.next() == [(2, 0), (1, 1)]
    assert steps.next() == [(2, 0), (1, 0)]

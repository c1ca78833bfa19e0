"""A simulated vLLM instance: its steps in time, its answers, and the handoffs that it pulls or keeps for others.

As long as nothing but streams runs, one event stands for many steps.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass

from disagg_router.interfaces import EngineLoad
from disagg_router.sim.jobs import Job, KvEvents, Timings
from disagg_router.sim.kv_cache import Held
from disagg_router.sim.links import Links, Transfer
from disagg_router.sim.scheduler import Room, Scheduler, Sequence

JUMP_STEPS = 64  # at most; between the first and the last of them times lie on a line, as they do where tables do


@dataclass(frozen=True, slots=True)
class Pull:
    """The prompt's KV lies at `source`, pinned by the prefill leg of that number."""

    source: SimInstance
    number: int


@dataclass(frozen=True, slots=True)
class Handoffs:
    """`handoff_s` is what a pull takes besides its bytes; `lease_s` how long a prefill is kept for it."""

    kv_bytes_per_token: float
    handoff_s: float = 0.0
    lease_s: float = 30.0


@dataclass(slots=True)
class _Jump:
    """Steps of streams alone, each longer than the one before by `growth_s`; `counted` of them show in the streams'
    figures already. `timer` is set as soon as it is known when they end."""

    begun_s: float
    first_s: float
    growth_s: float
    steps: int
    timer: asyncio.TimerHandle | None = None
    counted: int = 0

    def ended_s(self, steps: int) -> float:
        """When so many of them are over."""
        return self.begun_s + steps * (self.first_s + (steps - 1) / 2 * self.growth_s)

    def over(self, now_s: float) -> float:
        """How many are over: the inverse."""
        passed_s, half_s = now_s - self.begun_s, self.growth_s / 2
        first_s = self.first_s - half_s
        return 2 * passed_s / (first_s + math.sqrt(max(0.0, first_s * first_s + 4 * half_s * passed_s)))

    def longest_s(self, steps: int) -> float:
        """Of the first so many."""
        return self.first_s + max(0.0, (steps - 1) * self.growth_s)


class SimInstance:
    """Everything happens on the loop, at its times. `submit` answers by the job's futures. `noise_sd`: relative, of a
    step's time."""

    def __init__(
        self,
        name: str,
        *,
        timings: Timings,
        room: Room,
        handoffs: Handoffs,
        links: Links,
        events: KvEvents,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        noise_sd: float = 0.0,
    ) -> None:
        self.name, self._timings, self._handoffs, self._links = name, timings, handoffs, links
        self._loop, self._rng, self._noise_sd = loop, rng, noise_sd
        self._kv_capacity_tokens = room.kv_capacity_tokens
        self.scheduler = Scheduler(room, events)
        self._pinned: dict[int, tuple[Held, asyncio.TimerHandle]] = {}
        self._transfers: dict[Job, Transfer | asyncio.TimerHandle] = {}
        self._jump: _Jump | None = None
        self._step: asyncio.Handle | None = None
        self._pulled_bytes = self._pull_s = self.busy_s = 0.0

    # --- what is asked of it --------------------------------------------------------------------------------

    def submit(self, job: Job, pull: Pull | None = None) -> None:
        """Raises RuntimeError for a job that never fits, and for a pull of what is not pinned any more: a real engine
        would answer with other KV."""
        if pull is not None and pull.number not in pull.source._pinned:
            raise RuntimeError(f"{pull.source.name} holds no handoff {pull.number} any more")
        if not self.scheduler.fits(job):
            raise RuntimeError(f"{job.prompt_tokens} + {job.output_tokens} tokens do not fit into {self.name}")
        self.scheduler.waiting.append(Sequence(job, pull))
        self._wake()

    def abort(self, job: Job) -> None:
        """Its client has gone."""
        self.catch_up()
        sequence = self.scheduler.remove(job)
        if sequence is None:
            return
        transfer = self._transfers.pop(job, None)
        if isinstance(transfer, Transfer):
            self._links.cancel(transfer)
        elif transfer is not None:
            transfer.cancel()
        if sequence.pull is not None:
            sequence.pull.source.release(sequence.pull.number)
        self._wake()

    def release(self, number: int) -> None:
        """A handoff was pulled, or will not be: its blocks are free. Nothing happens a second time."""
        if pinned := self._pinned.pop(number, None):
            held, lease = pinned
            lease.cancel()
            self.scheduler.cache.release(held)
            self._wake()

    def catch_up(self) -> None:
        """Count the whole steps that are over."""
        if (jump := self._jump) is not None:
            self._count_steps(jump, min(int(jump.over(self._loop.time()) + 1e-9), jump.steps))

    def load(self) -> EngineLoad:
        scheduler = self.scheduler
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.pulling),
            kv_usage=scheduler.cache.used_blocks / scheduler.cache.capacity_blocks,
            kv_capacity_tokens=self._kv_capacity_tokens,
            pulled_bytes=self._pulled_bytes,
            pull_s=self._pull_s,
        )

    # --- steps ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Something has changed: a jump ends with the step that runs now."""
        if (jump := self._jump) is not None:
            steps = math.floor(jump.over(self._loop.time()) - 1e-9) + 1
            if steps < jump.steps:
                jump.steps = max(1, steps)
                self._until_end_of(jump)
        elif self._step is None:
            self._step = self._loop.call_soon(self._begin_step)

    def _begin_step(self) -> None:
        self._step = None
        chunks, pulls = self.scheduler.next()
        for sequence in pulls:
            self._begin_pull(sequence)
        if chunks:
            self._begin_mixed(chunks)
        elif self.scheduler.streams:
            self._begin_jump()

    def _begin_mixed(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Without chunked prefill the streams wait meanwhile."""
        scheduler = self.scheduler
        alone = scheduler.prefills_first and any(tokens > 1 for _, tokens in chunks)
        streams = [] if alone else list(scheduler.decoding())
        parts = [(tokens, sequence.computed_tokens) for sequence, tokens in chunks]
        context_tokens = 0 if alone else scheduler.context_tokens
        seconds = self._noise() * self._timings.step_s(parts, len(streams), context_tokens)
        self.busy_s += seconds
        self._step = self._loop.call_later(seconds, self._mixed_ended, chunks, streams)

    def _begin_jump(self) -> None:
        scheduler = self.scheduler
        streams = scheduler.streams
        left = min(one.job.output_tokens - one.job.tokens for one in scheduler.decoding())
        steps = max(1, min(left, JUMP_STEPS, scheduler.spare_tokens))
        luck, further = self._noise(), steps - 1
        first_s = luck * self._timings.step_s((), streams, scheduler.context_tokens)
        growth_s = 0.0
        if further:
            last_s = luck * self._timings.step_s((), streams, scheduler.context_tokens + streams * further)
            growth_s = (last_s - first_s) / further
        self._jump = _Jump(self._loop.time(), first_s, growth_s, steps)
        self._until_end_of(self._jump)

    def _until_end_of(self, jump: _Jump) -> None:
        if jump.timer is not None:
            jump.timer.cancel()
        jump.timer = self._loop.call_at(jump.ended_s(jump.steps), self._jump_ended)

    def _jump_ended(self) -> None:
        jump = self._jump
        assert jump is not None
        self._count_steps(jump, jump.steps)
        self._jump = None
        self.busy_s += jump.ended_s(jump.steps) - jump.begun_s
        self._end_those_that_are_done()
        self._begin_step()

    def _count_steps(self, jump: _Jump, over: int) -> None:
        new = over - jump.counted
        if new <= 0:
            return
        first_s, last_s, longest_s = jump.ended_s(jump.counted + 1), jump.ended_s(over), jump.longest_s(over)
        jump.counted = over
        for stream in self.scheduler.decoding():
            _told(stream.job, new, first_s, last_s)
            if new > 1 and stream.job.max_gap_s < longest_s:
                stream.job.max_gap_s = longest_s
            self.scheduler.grown(stream, new)

    def _mixed_ended(self, chunks: list[tuple[Sequence, int]], streams: list[Sequence]) -> None:
        self._step = None
        now_s, running = self._loop.time(), self.scheduler.running
        for stream in streams:
            if stream.job in running:
                _told(stream.job, 1, now_s, now_s)
                self.scheduler.grown(stream, 1)
        for sequence, tokens in chunks:
            if sequence.job in running:
                self.scheduler.computed(sequence, tokens)
                if sequence.decoding:
                    _told(sequence.job, 1, now_s, now_s)
        self._end_those_that_are_done()
        self._begin_step()

    def _end_those_that_are_done(self) -> None:
        for sequence in [one for one in self.scheduler.decoding() if one.job.tokens >= one.job.output_tokens]:
            job = sequence.job
            self.scheduler.leave(sequence)
            if job.pinned:
                lease = self._loop.call_later(self._handoffs.lease_s, self.release, job.number)
                self._pinned[job.number] = sequence.held, lease
            else:
                self.scheduler.cache.release(sequence.held)
            job.done.set_result(None)

    # --- pulls ----------------------------------------------------------------------------------------------

    def _begin_pull(self, sequence: Sequence) -> None:
        """There is room for the whole prompt; what is cached here needs no transfer."""
        begun_s = self._loop.time()
        self._transfers[sequence.job] = self._loop.call_later(self._handoffs.handoff_s, self._move, sequence, begun_s)

    def _move(self, sequence: Sequence, begun_s: float) -> None:
        pull = sequence.pull
        assert pull is not None
        moved_bytes = (sequence.wanted_tokens - sequence.computed_tokens) * self._handoffs.kv_bytes_per_token

        def arrived() -> None:
            self._pulled_bytes += moved_bytes
            self._pull_s += self._loop.time() - begun_s
            del self._transfers[sequence.job]
            sequence.pull = None
            pull.source.release(pull.number)
            self.catch_up()
            self.scheduler.pulled(sequence)
            self._wake()

        self._transfers[sequence.job] = self._links.start(pull.source.name, self.name, moved_bytes, arrived)

    def _noise(self) -> float:
        """What a step's time is multiplied by: 1 on average."""
        sd = self._noise_sd
        return math.exp(self._rng.gauss(-sd * sd / 2, sd)) if sd else 1.0


def _told(job: Job, new: int, first_s: float, last_s: float) -> None:
    """So many more tokens, the first and the last of them at these times."""
    if job.tokens == 0:
        job.first_s = first_s
        job.first.set_result(None)
    elif first_s - job.last_s > job.max_gap_s:
        job.max_gap_s = first_s - job.last_s
    job.tokens += new
    job.last_s = last_s

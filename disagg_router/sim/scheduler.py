"""Who is computed in an instance's next step: vLLM 0.32's scheduler (V1), without time.

Every stream gets its next token first, prefills in progress go on, then the waiting are let in, first come first
served, while tokens, blocks and sequences permit. Who finds no block makes the last that came give way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from disagg_router.sim.jobs import Job, KvEvents
from disagg_router.sim.kv_cache import Held, Keys, KvCache

if TYPE_CHECKING:
    from disagg_router.sim.instance import Pull

MAX_RUNNING = 256  # vLLM's --max-num-seqs on most hardware
WHOLE_STEP_TOKENS = 8192  # of prompts that are computed together where there are no chunks


@dataclass(frozen=True, slots=True)
class Room:
    """`chunk_tokens` None: prefills go first and whole, and streams wait."""

    chunk_tokens: int | None
    kv_capacity_tokens: int
    block_tokens: int
    max_running: int = MAX_RUNNING


class Sequence:
    """A job with what it has here: `computed_tokens` of `wanted_tokens` have their KV. `pull`: where the prompt's KV
    comes from, until it has."""

    __slots__ = ("computed_tokens", "held", "job", "pull", "wanted_tokens")

    def __init__(self, job: Job, pull: Pull | None) -> None:
        self.job, self.pull = job, pull
        self.held = Held()
        self.computed_tokens = 0
        self.wanted_tokens = job.prompt_tokens

    @property
    def decoding(self) -> bool:
        return self.computed_tokens >= self.wanted_tokens


class Step(NamedTuple):
    """`chunks`: prompt tokens to compute. `pulls`: sequences that have room now for what they pull."""

    chunks: list[tuple[Sequence, int]]
    pulls: list[Sequence]


class Scheduler:
    def __init__(self, room: Room, events: KvEvents) -> None:
        self._room = room
        self.cache = KvCache(room.kv_capacity_tokens // room.block_tokens, events)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Job, Sequence] = {}  # in the order in which they were let in
        self.pulling: dict[Job, Sequence] = {}
        self.streams = 0  # of the running: those that decode, and
        self.context_tokens = 0  # all their contexts together
        self.prompt_tokens = self.cached_tokens = 0  # of all that was let in so far: in all, and found here

    @property
    def prefills_first(self) -> bool:
        return self._room.chunk_tokens is None

    @property
    def spare_tokens(self) -> int:
        """So many each stream may go on without anybody being in want of blocks."""
        return self.cache.free_blocks // self.streams * self._room.block_tokens

    def fits(self, job: Job) -> bool:
        """Some day, if nothing else were here."""
        return self.blocks(job.prompt_tokens + job.output_tokens) <= self.cache.capacity_blocks

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self._room.block_tokens)

    def decoding(self) -> Iterable[Sequence]:
        return (one for one in self.running.values() if one.decoding)

    def next(self) -> Step:
        """With blocks for its chunks, for every stream's next token, and for the prompts that are pulled."""
        waiting = len(self.waiting)
        for one in list(self.decoding()):
            if one.job in self.running:
                self._secure(one, one.computed_tokens + 1)
        step, whole = Step([], []), self.prefills_first
        budget = WHOLE_STEP_TOKENS if self._room.chunk_tokens is None else self._room.chunk_tokens - self.streams
        for one in [one for one in self.running.values() if not one.decoding]:
            tokens = one.wanted_tokens - one.computed_tokens
            tokens = tokens if whole else min(tokens, budget)
            if tokens > 0 and one.job in self.running and self._secure(one, one.computed_tokens + tokens):
                self._give(step, one, tokens)
                budget -= tokens
        # Nobody comes in where somebody had to go, unless the step would be empty and be followed by another at once.
        if len(self.waiting) == waiting or not (step.chunks or self.streams):
            self._let_in(step, budget)
        return step

    def remove(self, job: Job) -> Sequence | None:
        """All that it holds is free."""
        if (sequence := self.running.get(job)) is not None:
            self.leave(sequence)
        elif (sequence := self.pulling.pop(job, None)) is None:
            sequence = next((one for one in self.waiting if one.job is job), None)
            if sequence is None:
                return None
            self.waiting.remove(sequence)
        self.cache.release(sequence.held)
        return sequence

    def leave(self, sequence: Sequence) -> None:
        """The running ones, with all that it holds."""
        del self.running[sequence.job]
        if sequence.decoding:
            self.streams -= 1
            self.context_tokens -= sequence.computed_tokens

    def computed(self, sequence: Sequence, tokens: int) -> None:
        """A chunk of its prompt."""
        sequence.computed_tokens += tokens
        if sequence.decoding:
            self.streams += 1
            self.context_tokens += sequence.computed_tokens

    def grown(self, stream: Sequence, tokens: int) -> None:
        """By so many tokens of its answer."""
        stream.computed_tokens += tokens
        stream.wanted_tokens = stream.computed_tokens
        self.context_tokens += tokens
        missing = self.blocks(stream.computed_tokens) - len(stream.held)
        if missing > 0 and not self.cache.allocate(stream.held, missing):
            raise AssertionError("a step was begun without the blocks that it needs")
        self._fill(stream, stream.computed_tokens)

    def pulled(self, sequence: Sequence) -> None:
        """Its last prompt token is computed here, which makes its first token."""
        del self.pulling[sequence.job]
        sequence.computed_tokens = sequence.wanted_tokens - 1
        self._fill(sequence, sequence.computed_tokens)
        self.running[sequence.job] = sequence

    # --- parts ----------------------------------------------------------------------------------------------

    def _let_in(self, step: Step, budget: int) -> None:
        while budget > 0 and self.waiting and len(self.running) + len(self.pulling) < self._room.max_running:
            sequence = self.waiting[0]
            cached = self._cached(sequence)
            computed_tokens = len(cached) * self._room.block_tokens
            tokens = sequence.wanted_tokens - computed_tokens
            if sequence.pull is None and not self.prefills_first:
                tokens = min(tokens, budget)
            too_many = sequence.pull is None and tokens > budget and step.chunks  # whole or not at all
            # There has to be room for all of it, however small its first chunk is.
            if too_many or not self.cache.has_room(cached, self.blocks(sequence.wanted_tokens) - len(cached)):
                return
            self.waiting.popleft()
            self.cache.take(sequence.held, cached)
            self.cache.allocate(sequence.held, self.blocks(computed_tokens + tokens) - len(cached))
            sequence.computed_tokens = computed_tokens
            if sequence.job.tokens == 0:
                sequence.job.cached_tokens = computed_tokens
            if sequence.pull is not None:
                self.pulling[sequence.job] = sequence
                step.pulls.append(sequence)
                continue
            self.running[sequence.job] = sequence
            self.prompt_tokens += sequence.job.prompt_tokens
            self.cached_tokens += sequence.job.cached_tokens
            self._give(step, sequence, tokens)
            budget -= tokens

    def _give(self, step: Step, sequence: Sequence, tokens: int) -> None:
        """A chunk, whose blocks others find at once: they are read later in the same step at the earliest."""
        step.chunks.append((sequence, tokens))
        self._fill(sequence, sequence.computed_tokens + tokens)

    def _secure(self, one: Sequence, tokens: int) -> bool:
        """Blocks for so many tokens of it, if need be those of the last that came. False: it was the last itself."""
        while (missing := self.blocks(tokens) - len(one.held)) > 0 and not self.cache.allocate(one.held, missing):
            last = next(reversed(self.running.values()))
            self._preempt(last)
            if last is one:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Everything of it is computed anew, its answer so far included."""
        self.leave(sequence)
        self.cache.release(sequence.held)
        sequence.computed_tokens = 0
        sequence.wanted_tokens = sequence.job.prompt_tokens + sequence.job.tokens
        self.waiting.appendleft(sequence)

    def _cached(self, sequence: Sequence) -> Keys:
        """The last token is always computed: its logits are the next token."""
        keys = sequence.job.keys[: (sequence.wanted_tokens - 1) // self._room.block_tokens]
        return keys[: self.cache.cached_blocks(keys)]

    def _fill(self, sequence: Sequence, tokens: int) -> None:
        """The KV of its first so many is there, or will be when the step ends."""
        full, before = tokens // self._room.block_tokens, len(sequence.held.keys)
        if full > before:
            job = sequence.job
            self.cache.fill(sequence.held, job.keys[before:full], job.blocks[before:full])

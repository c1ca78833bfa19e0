"""Workloads out of traces, conversations and made-up lengths.

One seed gives one workload, and neither a rate nor a way to arrive changes what is asked for: policies and rates are
compared on the same requests.
"""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from disagg_router.errors import ConfigError
from disagg_router.sim.model import Arrival, Workload
from disagg_router.sim.traces import FORMATS, MAX_BLOCK_IDS, QUANTA_S, HashedRow, LengthRow, Row, TurnRow

BLOCK_TOKENS = 64  # where a format doesn't say
THINK_S = 20.0  # mean time between an answer's end and the next question
ANSWER_S_PER_TOKEN = 0.03  # a guess of when an answer ends, the same for every policy


@dataclass(frozen=True, slots=True)
class Cut:
    """Which rows of a file: those that are not longer, without the first `skip` of them, up to `requests`."""

    requests: int | None = None
    skip: int = 0
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None  # of prompt and answer together

    def allows(self, row: Row) -> bool:
        prompt_tokens, tokens = row.prompt_tokens, row.prompt_tokens + row.output_tokens
        return prompt_tokens <= (self.max_prompt_tokens or math.inf) and tokens <= (self.max_tokens or math.inf)


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests arrive. Without a rate: at the trace's own times.

    With one, `poisson`: in the trace's order, the last of N at N / rate exactly (as `vllm bench serve` does, so that no
    luck is in the rate); `trace`: its own times, stretched to that mean rate. `jitter_s`: own times are moved later by
    up to this much each; None is what the format needs.
    """

    rate_rps: float | None = None
    arrivals: Literal["poisson", "trace"] = "poisson"
    jitter_s: float | None = None
    think_s: float = THINK_S  # between the turns of a conversation

    def __post_init__(self) -> None:
        if self.rate_rps is not None and not 0 < self.rate_rps < math.inf:
            raise ConfigError(f"a rate must be above 0 requests per second, not {self.rate_rps}: give another")


@dataclass(frozen=True, slots=True)
class Loaded:
    """`empty_rows` had no prompt or no answer, `long_rows` were longer than asked for; neither is in the workload."""

    workload: Workload
    empty_rows: int = 0
    long_rows: int = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of made-up requests: means; `sigma` of the logarithm of both (lognormal), 0: all are alike."""

    prompt_tokens: int
    output_tokens: int
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`512/64` or `512:64`. Raises ConfigError."""
        parts = text.replace(":", "/").split("/")
        if len(parts) != 2 or not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
            raise ConfigError(f"lengths {text!r} must be prompt and answer tokens, as in 512/64: correct them")
        return cls(int(parts[0]), int(parts[1]))

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Prompt and answer tokens."""
        prompt, output = (mean * self._factor(rng) for mean in (self.prompt_tokens, self.output_tokens))
        return max(1, round(prompt)), max(1, round(output))

    def _factor(self, rng: random.Random) -> float:
        return math.exp(rng.gauss(-(self.sigma**2) / 2, self.sigma)) if self.sigma else 1.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request without its time."""

    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]


WHOLE = Cut()
AS_IN_TRACE = Pace()


def load(
    file: Path,
    format_name: str,
    rng: random.Random,
    *,
    cut: Cut = WHOLE,
    pace: Pace = AS_IN_TRACE,
    block_tokens: int = BLOCK_TOKENS,
) -> Loaded:
    """`block_tokens`: of formats that don't say. Raises ConfigError."""
    reader = FORMATS.get(format_name)
    if reader is None:
        raise ConfigError(f"there is no trace format {format_name!r}: give one of {', '.join(FORMATS)}")
    with closing(reader(file)) as rows:
        kept, empty_rows, long_rows = _kept(rows, cut)
    if not kept:
        raise ConfigError(f"{file} has no rows to simulate ({empty_rows} empty, {long_rows} too long): allow more")
    turns = [row for row in kept if isinstance(row, TurnRow)]
    if turns:
        workload = _conversations(file, turns, pace, block_tokens, rng)
    else:
        timed = [row for row in kept if not isinstance(row, TurnRow)]
        jitter_s = QUANTA_S.get(format_name, 0.0) if pace.jitter_s is None else pace.jitter_s
        times_s = _times_s([row.at_s for row in timed], pace, jitter_s, rng)
        size = next((row.block_tokens for row in timed if isinstance(row, HashedRow)), block_tokens)
        workload = _workload(file.stem, size, times_s, _contents(timed, size))
    return Loaded(workload, empty_rows, long_rows)


def synthetic(
    lengths: Lengths, requests: int, rate_rps: float, rng: random.Random, *, block_tokens: int = BLOCK_TOKENS
) -> Workload:
    """Poisson arrivals that share nothing."""
    times, drawn = (random.Random(rng.getrandbits(64)) for _ in range(2))
    asked = _contents([LengthRow(0.0, *lengths.draw(drawn)) for _ in range(requests)], block_tokens)
    times_s = _poisson_s(requests, requests / rate_rps, times)
    return _workload(f"{lengths.prompt_tokens}/{lengths.output_tokens}", block_tokens, times_s, asked)


def mix_shift(first: Workload, second: Workload, at_s: float) -> Workload:
    """`first` up to a moment, `second` from there on. They share nothing."""
    if first.block_tokens != second.block_tokens:
        raise ConfigError(f"{first.name} and {second.name} have different block sizes: give two with the same")
    before = [arrival for arrival in first.arrivals if arrival.at_s <= at_s]
    offset = 1 + max((_top(arrival.blocks) for arrival in before), default=-1)
    asked = [_Asked(arrival.prompt_tokens, arrival.output_tokens, arrival.blocks) for arrival in before]
    for arrival in second.arrivals:
        blocks = _moved(arrival.blocks, offset)
        asked.append(_Asked(arrival.prompt_tokens, arrival.output_tokens, blocks))
    times_s = [arrival.at_s for arrival in before] + [at_s + arrival.at_s for arrival in second.arrivals]
    return _workload(f"{first.name} then {second.name}", first.block_tokens, times_s, asked)


def _kept(rows: Iterable[Row], cut: Cut) -> tuple[list[Row], int, int]:
    """And how many were empty, and how many too long."""
    kept: list[Row] = []
    empty_rows = long_rows = 0
    left_to_skip = cut.skip
    for row in rows:
        if cut.requests is not None and len(kept) >= cut.requests:
            break
        if not (row.prompt_tokens and row.output_tokens):
            empty_rows += 1
        elif not cut.allows(row):
            long_rows += 1
        elif left_to_skip:
            left_to_skip -= 1
        else:
            kept.append(row)
    return kept, empty_rows, long_rows


def _times_s(own_s: Sequence[float], pace: Pace, jitter_s: float, rng: random.Random) -> list[float]:
    count = len(own_s)
    if pace.rate_rps is not None and pace.arrivals == "poisson":
        return _poisson_s(count, count / pace.rate_rps, rng)
    moved_s = [at_s + rng.uniform(0.0, jitter_s) for at_s in own_s]
    first_s, span_s = min(moved_s), max(moved_s) - min(moved_s)
    if pace.rate_rps is None:
        return [at_s - first_s for at_s in moved_s]
    if count > 1 and not span_s:
        raise ConfigError("these rows all have one time, which no rate can stretch: ask for poisson arrivals")
    factor = (count - 1) / pace.rate_rps / span_s if span_s else 0.0
    return [(at_s - first_s) * factor for at_s in moved_s]


def _poisson_s(count: int, span_s: float, rng: random.Random) -> list[float]:
    times_s = list(itertools.accumulate(rng.expovariate(1.0) for _ in range(count)))
    return [at_s / times_s[-1] * span_s for at_s in times_s]


def _contents(rows: Sequence[LengthRow | HashedRow], block_tokens: int) -> list[_Asked]:
    """The block in which a prompt ends goes on with its answer, which nobody else has: from there on ids are new."""
    new_id = 1 + max((_top(row.block_ids) for row in rows if isinstance(row, HashedRow)), default=-1)
    asked = []
    for row in rows:
        known = row.block_ids[: row.prompt_tokens // block_tokens] if isinstance(row, HashedRow) else None
        count = _blocks(row, block_tokens) - len(known or ())
        new_ids = range(new_id, new_id + count)
        new_id = new_ids.stop
        blocks = known + array("I", new_ids) if known else new_ids
        asked.append(_Asked(row.prompt_tokens, row.output_tokens, blocks))
    return asked


def _conversations(file: Path, turns: Sequence[TurnRow], pace: Pace, block_tokens: int, rng: random.Random) -> Workload:
    """Conversations begin as a Poisson process, and a turn comes a while after the answer before it.

    What would arrive after the N / rate seconds of N requests is put that much earlier, as a turn of a conversation
    begun before the run: so the rate is the one asked for from the first second to the last. It shares nothing with
    the conversation's turns before it, which the run's caches can't have seen by then.
    """
    if pace.rate_rps is None or pace.arrivals == "trace":
        raise ConfigError(f"{file} has no times: give a rate, and poisson arrivals")
    starts, thinking = (random.Random(rng.getrandbits(64)) for _ in range(2))
    span_s = len(turns) / pace.rate_rps
    grouped = [list(group) for _, group in itertools.groupby(turns, key=lambda turn: turn.conversation)]
    times_s: list[float] = []
    asked: list[_Asked] = []
    new_id = 0
    for began_s, conversation in zip(_poisson_s(len(grouped), span_s, starts), grouped, strict=True):
        at_s, lap, history_tokens, base = began_s, -1.0, 0, new_id
        for turn in conversation:
            turn_lap, turn_s = divmod(at_s, span_s)
            if turn_lap != lap or turn.history_tokens < history_tokens:
                lap, base = turn_lap, new_id
            blocks = range(base, base + _blocks(turn, block_tokens))
            new_id = max(new_id, blocks.stop)
            times_s.append(turn_s)
            asked.append(_Asked(turn.prompt_tokens, turn.output_tokens, blocks))
            history_tokens = turn.prompt_tokens + turn.output_tokens
            at_s += turn.output_tokens * ANSWER_S_PER_TOKEN + thinking.expovariate(1.0) * pace.think_s
    return _workload(file.stem, block_tokens, times_s, asked)


def _workload(name: str, block_tokens: int, times_s: Sequence[float], asked: Sequence[_Asked]) -> Workload:
    if max((_top(request.blocks) for request in asked), default=0) >= MAX_BLOCK_IDS:
        raise ConfigError(f"{name} has more than {MAX_BLOCK_IDS} blocks: ask for fewer requests")
    order = sorted(range(len(asked)), key=times_s.__getitem__)
    arrivals = tuple(
        Arrival(number, times_s[i], asked[i].prompt_tokens, asked[i].output_tokens, asked[i].blocks)
        for number, i in enumerate(order)
    )
    return Workload(name, block_tokens, arrivals)


def _blocks(row: Row, block_tokens: int) -> int:
    return math.ceil((row.prompt_tokens + row.output_tokens) / block_tokens)


def _top(blocks: Sequence[int]) -> int:
    """The highest id, -1 of none."""
    return blocks[-1] if isinstance(blocks, range) and blocks else max(blocks, default=-1)


def _moved(blocks: Sequence[int], offset: int) -> Sequence[int]:
    if isinstance(blocks, range):
        return range(blocks.start + offset, blocks.stop + offset)
    return array("I", (id_ + offset for id_ in blocks))

"""One leg of a request on a simulated instance."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from disagg_router.sim.model import Outcome


class Job:
    """`keys` are the chained keys of the full blocks of prompt and answer (token_hashes), `blocks` their content ids.

    `pinned`: a prefill leg, whose blocks stay when it is done until somebody releases them or its lease ends. `first`
    and `done` are set by the instance at the virtual time of the first and of the last token, as are the figures below
    them; between two events of the instance they are as of the last `catch_up`.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "done",
        "first",
        "first_s",
        "keys",
        "last_s",
        "max_gap_s",
        "number",
        "output_tokens",
        "pinned",
        "prompt_tokens",
        "tokens",
    )

    def __init__(
        self,
        number: int,
        *,
        prompt_tokens: int,
        output_tokens: int,
        blocks: Sequence[int],
        keys: Sequence[int],
        pinned: bool = False,
    ) -> None:
        self.number, self.prompt_tokens, self.output_tokens = number, prompt_tokens, output_tokens
        self.blocks, self.keys, self.pinned = blocks, keys, pinned
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_s = self.last_s = 0.0
        self.max_gap_s = 0.0  # between two tokens of it
        self.tokens = 0  # of its answer, so far
        self.cached_tokens = 0  # of its prompt, as the instance found it when it began


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run stands. `underway`: arrivals that have not ended, by number, with their streams from the first token
    on; None before."""

    outcomes: list[Outcome] = field(default_factory=list)  # in the order in which they ended
    underway: dict[int, Job | None] = field(default_factory=dict)


class KvEvents(Protocol):
    """Told what an instance's cache holds, as a vLLM engine publishes it."""

    def stored(self, keys: Sequence[int], parent: int | None, blocks: Sequence[int]) -> None:
        """Full blocks with these keys and content ids, each the child of the one before, the first of `parent`."""
        ...

    def removed(self, keys: Sequence[int]) -> None: ...


class Timings(Protocol):
    """How long an engine's steps take: measured tables, never the policy's formulas."""

    def step_s(self, chunks: Sequence[tuple[int, int]], running: int, context_tokens: float) -> float:
        """One step: prompt chunks as (new tokens, tokens of that prompt before them), and the streams beside them,
        whose contexts add up to `context_tokens`. Host overhead included, noise not."""
        ...

"""What a router gets wrong or hears late: expected answers, believed prefill times, the state of its engines."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg_router.interfaces import CostModel, OutputPredictor, PrefillWork
from disagg_router.model import InstanceId, Pair, Target
from disagg_router.sim.jobs import KvEvents
from disagg_router.timing import CostSnapshot, TargetTiming

REDRAW_S = 1.0


@dataclass(frozen=True, slots=True)
class Noise:
    """`output_sd` is relative, of each request's expected answer; `prefill_sd` relative, of what is believed of each
    target's prefills, another error every REDRAW_S. `state_age_s`: KV events, loads and how far streams are, are heard
    of so much later. What the router itself does and sees, it knows at once."""

    output_sd: float = 0.0
    prefill_sd: float = 0.0
    state_age_s: float = 0.0


NONE = Noise()


class NoisyOutputs:
    """An OutputPredictor whose expectations are right on average only."""

    def __init__(self, outputs: OutputPredictor, sd: float, rng: random.Random) -> None:
        self._outputs, self._sd, self._rng = outputs, sd, rng

    def expect(self, max_output_tokens: int | None) -> float:
        tokens = self._outputs.expect(max_output_tokens) * factor(self._rng, self._sd)
        return tokens if max_output_tokens is None else min(tokens, float(max(1, max_output_tokens)))

    def observe(self, max_output_tokens: int | None, output_tokens: int) -> None:
        self._outputs.observe(max_output_tokens, output_tokens)


class NoisyCosts:
    """A CostModel that learns rightly and believes wrongly."""

    def __init__(self, costs: CostModel, sd: float, rng: random.Random) -> None:
        self._costs, self._sd, self._rng = costs, sd, rng
        self._drawn_s = -math.inf
        self._factors: dict[Target | None, float] = {}  # None: of the targets of which nothing is known yet
        self._right: CostSnapshot | None = None
        self._wrong: CostSnapshot | None = None

    def snapshot(self, now_s: float) -> CostSnapshot:
        right, wrong = self._costs.snapshot(now_s), self._wrong
        if now_s - self._drawn_s >= REDRAW_S:
            self._factors, self._drawn_s, wrong = {}, now_s, None
        if wrong is None or right is not self._right:
            wrong = dataclasses.replace(
                right,
                target=self._scaled(None, right.target),
                targets={target: self._scaled(target, timing) for target, timing in right.targets.items()},
            )
        self._right, self._wrong = right, wrong
        return wrong

    def prefilled(self, target: Target, work: PrefillWork, seconds: float, now_s: float) -> None:
        self._costs.prefilled(target, work, seconds, now_s)

    def stepped(self, target: Target, running: float, context_tokens: float, seconds: float, now_s: float) -> None:
        self._costs.stepped(target, running, context_tokens, seconds, now_s)

    def handed_off(self, pair: Pair, moved_bytes: float, seconds: float, now_s: float) -> None:
        self._costs.handed_off(pair, moved_bytes, seconds, now_s)

    def transferred(self, decode: InstanceId, moved_bytes: float, seconds: float, now_s: float) -> None:
        self._costs.transferred(decode, moved_bytes, seconds, now_s)

    def forget(self, target: Target) -> None:
        self._costs.forget(target)

    def _scaled(self, target: Target | None, timing: TargetTiming) -> TargetTiming:
        by = self._factors.get(target)
        if by is None:
            by = self._factors[target] = factor(self._rng, self._sd)
        return dataclasses.replace(
            timing,
            prefill_a_s=timing.prefill_a_s * by,
            prefill_b_s=timing.prefill_b_s * by,
            prefill_c_s=timing.prefill_c_s * by,
        )


class Delay:
    """Whatever is told comes so much later, in the order in which it was told; at once where the age is 0."""

    def __init__(self, age_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._age_s, self._loop = age_s, loop
        self._told: deque[Callable[[], None]] = deque()

    def tell(self, told: Callable[[], None]) -> None:
        if not self._age_s:
            told()
            return
        # Timers of one moment come in any order, so none of them stands for one call.
        self._told.append(told)
        self._loop.call_later(self._age_s, self._heard)

    def _heard(self) -> None:
        self._told.popleft()()


class LateEvents:
    """KvEvents that are heard of later."""

    def __init__(self, events: KvEvents, delay: Delay) -> None:
        self._events, self._delay = events, delay

    def stored(self, keys: Sequence[int], parent: int | None, blocks: Sequence[int]) -> None:
        self._delay.tell(lambda: self._events.stored(keys, parent, blocks))

    def removed(self, keys: Sequence[int]) -> None:
        self._delay.tell(lambda: self._events.removed(keys))


def factor(rng: random.Random, sd: float) -> float:
    """Lognormal, 1 on average."""
    return math.exp(rng.gauss(-sd * sd / 2, sd)) if sd else 1.0

"""The answers that are being passed on: how far each is, and how much later it may end and still be good."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

from disagg_router.interfaces import CostModel
from disagg_router.model import Slo, Target
from disagg_router.routing.prefill_queue import Beside
from disagg_router.view import NO_SLACK, SLACK_EDGES_S, StreamLoad

LEAST_TO_COME_TOKENS = 3.0  # of an answer that is longer than was expected (the policy study's value)
LOST = 0.25  # a stream that lacks more than this part of all the time it was allowed will not catch up
# A look at a target's streams is good for so long; longer the more there are in all, since each costs some time.
LOOK_S, LONGEST_LOOK_S, LOOK_S_PER_STREAM = 0.1, 0.5, 0.0005
EARLY = 0.4  # the timer looks at this part of that age, so that a decision seldom has to

_NO_BIN = -1


class Stream:
    """One answer, from its first byte on. `count` is called for every chunk, so it does next to nothing."""

    __slots__ = (
        "_streams",
        "bin",
        "expected_tokens",
        "first_s",
        "last_s",
        "max_gap_s",
        "max_tokens",
        "over_tokens",
        "prompt_tokens",
        "slo",
        "to_come_tokens",
        "tokens",
        "whole",
    )

    def __init__(
        self,
        streams: TargetStreams,
        slo: Slo,
        prompt_tokens: int,
        expected_tokens: float,
        max_tokens: float,
        now_s: float,
    ) -> None:
        self._streams, self.slo = streams, slo
        self.prompt_tokens, self.expected_tokens, self.max_tokens = prompt_tokens, expected_tokens, max_tokens
        self.first_s = self.last_s = now_s
        self.max_gap_s = 0.0
        self.tokens = 0
        self.bin, self.to_come_tokens, self.over_tokens, self.whole = _NO_BIN, 0.0, 0.0, False  # as of the last look

    def count(self, events: int, now_s: float) -> None:
        """`events` tokens have come."""
        gap_s = now_s - self.last_s
        self.max_gap_s = max(self.max_gap_s, gap_s)
        self.last_s = now_s
        self.tokens += events
        streams = self._streams
        streams.context_tokens += events
        streams.last_s = now_s

    def follow(self, tokens: int, last_s: float, max_gap_s: float) -> None:
        """As `count`, for many events at once: so many tokens have come in all, the last one then."""
        streams = self._streams
        streams.context_tokens += tokens - self.tokens
        self.tokens, self.last_s, self.max_gap_s = tokens, last_s, max_gap_s
        streams.last_s = max(streams.last_s, last_s)

    def close(self) -> None:
        """It is over, however it ended. A second time does nothing."""
        self._streams.remove(self)

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.tokens


class TargetStreams:
    """Those of one target, with their sums. `version` changes whenever one comes or goes, and never comes back."""

    __slots__ = (
        "_book",
        "_load",
        "_looked_s",
        "context_tokens",
        "gap_s",
        "last_s",
        "open",
        "over_tokens",
        "slack",
        "target",
        "to_come_tokens",
        "unbroken",
        "version",
    )

    def __init__(self, book: StreamBook, target: Target) -> None:
        self._book, self.target = book, target
        self.open: dict[Stream, None] = {}
        self.context_tokens = 0
        self.last_s = 0.0
        self.version = 0
        self._looked_s = -math.inf
        self._load: StreamLoad | None = None
        self._clear()

    def _clear(self) -> None:
        self.slack: list[int] = [*NO_SLACK]
        self.to_come_tokens, self.over_tokens, self.unbroken, self.gap_s = 0.0, 0.0, 0, math.inf

    def add(self, stream: Stream, now_s: float) -> None:
        self.open[stream] = None
        self.context_tokens += stream.context_tokens
        self.last_s = now_s
        self._look_at((stream,), now_s)
        self._changed(+1)

    def remove(self, stream: Stream) -> None:
        if stream not in self.open:
            return
        del self.open[stream]
        self.context_tokens -= stream.context_tokens
        self.to_come_tokens -= stream.to_come_tokens
        self.over_tokens -= stream.over_tokens
        self.unbroken -= stream.whole  # a tighter objective than all others' loosens at the next look
        if stream.bin != _NO_BIN:
            self.slack[stream.bin] -= 1
        self._changed(-1)

    def look(self, now_s: float, age_s: float) -> None:
        """At every stream, unless the last look is younger than `age_s`."""
        if now_s - self._looked_s < age_s:
            return
        self._looked_s, self._load = now_s, None
        self._clear()
        self._look_at(self.open, now_s)

    def load(self) -> StreamLoad:
        if self._load is None:
            self._load = StreamLoad(
                running=len(self.open),
                context_tokens=self.context_tokens,
                to_come_tokens=self.to_come_tokens / len(self.open),
                slack=tuple(self.slack),
                unbroken=self.unbroken,
                gap_s=self.gap_s if self.unbroken else math.inf,
                over_tokens=self.over_tokens,
            )
        return self._load

    def _changed(self, change: int) -> None:
        self._load = None
        self.version = self._book.changed(self, change)

    def _look_at(self, streams: Iterable[Stream], now_s: float) -> None:
        """Say anew where each stands, and add it to the sums. One loop without calls: it goes over thousands."""
        timing = self._book.costs.snapshot(now_s).of(self.target)
        step_s = timing.step_mean_s(len(self.open), self.context_tokens)
        for stream in streams:
            slo, tokens = stream.slo, stream.tokens
            to_come = stream.expected_tokens - tokens
            if to_come < LEAST_TO_COME_TOKENS:  # noqa: PLR1730 - max() takes five times as long
                to_come = LEAST_TO_COME_TOKENS
            if to_come > stream.max_tokens - tokens:
                to_come = max(0.0, stream.max_tokens - tokens)
            budget_s = slo.tpot_s * (tokens + to_come - 1)  # TPOT counts from the first token
            slack_s = budget_s - (now_s - stream.first_s) - to_come * step_s
            stream.to_come_tokens = to_come
            self.to_come_tokens += to_come
            stream.over_tokens = tokens - stream.expected_tokens if tokens > stream.expected_tokens else 0.0
            self.over_tokens += stream.over_tokens
            stream.whole = stream.max_gap_s <= slo.max_gap_s and now_s - stream.last_s <= slo.max_gap_s
            if stream.whole:
                self.unbroken += 1
                self.gap_s = min(self.gap_s, slo.max_gap_s)
            if slack_s >= -LOST * budget_s:
                stream.bin = bisect_right(SLACK_EDGES_S, slack_s)
                self.slack[stream.bin] += 1
            else:
                stream.bin = _NO_BIN


class StreamBook:
    """All streams by target. `touched` collects the targets where one has come or gone."""

    def __init__(self, costs: CostModel, touched: set[Target]) -> None:
        self.costs, self._touched = costs, touched
        self._targets: dict[Target, TargetStreams] = {}
        self._count = self._versions = 0

    def open(
        self,
        target: Target,
        slo: Slo,
        *,
        prompt_tokens: int,
        expected_tokens: float,
        max_tokens: int | None,
        now_s: float,
    ) -> Stream:
        """The answer's first byte is there; `count` its first token next. Whoever opens one closes it."""
        streams = self._targets.get(target)
        if streams is None:
            streams = self._targets[target] = TargetStreams(self, target)
        limit = math.inf if max_tokens is None else max_tokens
        stream = Stream(streams, slo, prompt_tokens, expected_tokens, limit, now_s)
        streams.add(stream, now_s)
        return stream

    def load(self, target: Target, now_s: float) -> StreamLoad:
        streams = self._targets.get(target)
        if streams is None:
            return StreamLoad()
        streams.look(now_s, self._look_s())
        return streams.load()

    def beside(self, target: Target) -> Beside:
        """How many run there now, and the sum of their contexts."""
        streams = self._targets.get(target)
        return Beside(len(streams.open), streams.context_tokens) if streams else Beside(0, 0)

    def by_target(self) -> tuple[TargetStreams, ...]:
        return tuple(self._targets.values())

    def look(self, now_s: float) -> None:
        """On a timer."""
        for streams in self._targets.values():
            streams.look(now_s, self._look_s() * EARLY)

    def changed(self, streams: TargetStreams, change: int) -> int:
        """Told by a target's streams; the new version for them."""
        self._count += change
        self._versions += 1
        self._touched.add(streams.target)
        if not streams.open:
            del self._targets[streams.target]
        return self._versions

    def _look_s(self) -> float:
        return min(LONGEST_LOOK_S, max(LOOK_S, self._count * LOOK_S_PER_STREAM))

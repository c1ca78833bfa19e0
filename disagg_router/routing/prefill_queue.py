"""The prefills placed on one target, first come first served, and what their ends say of its speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from disagg_router.interfaces import Claim

# An answer that comes within this part of its own prediction after the one before was computed together with it.
TOGETHER = 0.25
# A prefill that should be over is expected to take this part of its overrun longer: the older, the longer (Lindy).
OVERRUN = 0.5


class Beside(NamedTuple):
    """The streams that run beside a prefill, and the sum of their contexts."""

    running: float
    context_tokens: float


class Place:
    """One prefill's place. Times are of its turn: a place that waits has none yet."""

    __slots__ = ("attention", "beside", "clear", "observed", "predicted_s", "sd_s", "started_s", "tokens")

    def __init__(self, claim: Claim, *, observed: bool) -> None:
        self.tokens, self.attention, self.predicted_s = claim.prefill_tokens, claim.prefill_attention, claim.prefill_s
        self.sd_s, self.observed = claim.prefill_sd_s, observed
        self.started_s = 0.0
        self.beside = Beside(0.0, 0.0)
        self.clear = False  # whether started_s is when the engine began with it


@dataclass(slots=True)
class Batch:
    """Prefills whose answers came together: an engine computes short prompts in one step."""

    started_s: float
    ended_s: float
    begin: Beside
    end: Beside
    clear: bool
    tokens: int = 0
    attention: float = 0.0
    overtaken: Place | None = None  # came first and has not answered yet

    def join(self, place: Place, head: Place, now_s: float, beside: Beside) -> None:
        self.ended_s, self.end = now_s, beside
        self.tokens += place.tokens
        self.attention += place.attention
        self.clear = self.clear and place.tokens > 0  # 0: nobody counted them
        if place is self.overtaken:
            self.overtaken = None
        elif place is not head and self.overtaken is None:
            self.overtaken = head

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s

    @property
    def mean(self) -> Beside:
        return Beside(
            (self.begin.running + self.end.running) / 2, (self.begin.context_tokens + self.end.context_tokens) / 2
        )


class PrefillQueue:
    """`complete` gets every batch that is whole and whose beginning is known.

    A place that is not observed (nobody sees when the prefill of an unstreamed answer ends) is gone at its predicted
    end. Whatever begins soon after an end that nobody saw is not reported: the engine may still have been busy.
    """

    def __init__(self, complete: Callable[[Batch], None]) -> None:
        self._complete = complete
        self._places: list[Place] = []
        self._batch: Batch | None = None
        self._doubt_s = 0.0  # until then the engine may be busy with something that has left this queue
        self._predicted_s = 0.0
        self._unseen = 0
        self.tokens = 0
        self.sd_s = 0.0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, place: Place, now_s: float, beside: Beside) -> None:
        if self._places or self._batch:
            self.settle(now_s)
        self._places.append(place)
        self._unseen += not place.observed
        self._predicted_s += place.predicted_s
        self.tokens += place.tokens
        self.sd_s += place.sd_s
        if len(self._places) == 1:
            self._start(place, now_s, beside, clear=True)

    def remove(self, place: Place, now_s: float, beside: Beside, *, done: bool) -> None:
        """`done`: its answer came. A place that has expired is not there any more, which is no error."""
        self.expire(now_s)
        if place not in self._places:
            return
        head = self._places[0]
        self._drop(place)
        seen = done and place.observed
        if seen:
            self._answered(place, head, now_s, beside)
        elif place is head and not done:
            self._doubt_s = max(self._doubt_s, now_s + place.predicted_s)  # an abort waits for the end of a step
        if not self._places:
            self._close_batch()
        elif place is head:
            self._start(self._places[0], now_s, beside, clear=seen)

    def expire(self, now_s: float) -> bool:
        """Drop what is not observed and should be over. True: there was something."""
        if not self._unseen:
            return False
        expired = False
        while self._places and not (head := self._places[0]).observed:
            end_s = head.started_s + head.predicted_s
            if end_s > now_s:
                break
            self._drop(head)
            self._doubt_s = max(self._doubt_s, end_s + head.predicted_s)
            if self._places:
                self._start(self._places[0], end_s, head.beside, clear=False)
            expired = True
        return expired

    def settle(self, now_s: float) -> bool:
        """`expire`, and report a batch that nothing can join any more."""
        expired = self.expire(now_s)
        if self._batch and (not self._places or now_s - self._batch.ended_s >= TOGETHER * self._places[0].predicted_s):
            self._close_batch()
        return expired

    def doubt(self) -> None:
        """The engine is another process now: nothing that has begun says how fast it is."""
        self._batch = None
        if self._places:
            self._places[0].clear = False

    def end_s(self, now_s: float) -> float:
        """When the last one is predicted to be over; `now_s` when there is none. Call `expire` first."""
        if not self._places:
            return now_s
        head = self._places[0]
        left_s = head.started_s + head.predicted_s - now_s
        if left_s < 0:
            left_s *= -OVERRUN
        return now_s + left_s + max(0.0, self._predicted_s - head.predicted_s)

    # --- steps ---

    def _start(self, place: Place, now_s: float, beside: Beside, *, clear: bool) -> None:
        place.started_s, place.beside = now_s, beside
        place.clear = clear and now_s >= self._doubt_s

    def _drop(self, place: Place) -> None:
        self._places.remove(place)
        self._predicted_s = self._predicted_s - place.predicted_s if self._places else 0.0  # no rounding is left over
        self.sd_s = self.sd_s - place.sd_s if self._places else 0.0
        self._unseen -= not place.observed
        self.tokens -= place.tokens

    def _answered(self, place: Place, head: Place, now_s: float, beside: Beside) -> None:
        batch = self._batch
        if batch is None or now_s - batch.ended_s >= TOGETHER * place.predicted_s:
            self._close_batch()
            batch = self._batch = Batch(head.started_s, now_s, head.beside, beside, head.clear)
        batch.join(place, head, now_s, beside)

    def _close_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if batch.overtaken is not None:
            batch.overtaken.clear = False  # part of its time went into what overtook it
        elif batch.clear:
            self._complete(batch)

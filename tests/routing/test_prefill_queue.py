"""The queue of prefills: when it is predicted to be empty, and what its answers tell of the target's speed."""

from __future__ import annotations

from typing import Any

import pytest

from disagg_router.interfaces import Claim
from disagg_router.routing.prefill_queue import Batch, Beside, Place, PrefillQueue

ALONE = Beside(0, 0)


def place(predicted_s: float, tokens: int = 100, *, observed: bool = True) -> Place:
    claim = Claim(decode_kv_bytes=0.0, prefill_tokens=tokens, prefill_attention=2.0 * tokens, prefill_s=predicted_s)
    return Place(claim, observed=observed)


class Queue:
    """A queue with what it has reported: tokens and seconds."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.queue = PrefillQueue(self.batches.append)

    def add(self, *places: Place, now_s: float = 0.0, beside: Beside = ALONE) -> None:
        for one in places:
            self.queue.add(one, now_s, beside)

    def answer(self, one: Place, now_s: float, beside: Beside = ALONE) -> None:
        self.queue.remove(one, now_s, beside, done=True)

    def cancel(self, one: Place, now_s: float) -> None:
        self.queue.remove(one, now_s, ALONE, done=False)

    @property
    def reported(self) -> list[tuple[int, Any]]:
        return [(batch.tokens, pytest.approx(batch.seconds)) for batch in self.batches]


# --- when it ends ---


@pytest.mark.parametrize(
    ("now_s", "end_s"),
    [
        (0.0, 3.0),
        (0.4, 3.0),
        (1.0, 3.0),  # the head should answer now
        (2.0, 4.5),  # 1 s over: half a second more, then 2 s
        (11.0, 18.0),  # 10 s over: 5 s more, then 2 s; a frozen engine looks worse and worse
    ],
)
def test_the_head_overruns_and_the_others_wait(now_s: float, end_s: float):
    """1 s and then 2 s, both placed at 0."""
    queue = Queue()
    queue.add(place(1.0), place(2.0))
    assert queue.queue.end_s(now_s) == pytest.approx(end_s)


def test_the_next_one_starts_when_its_predecessor_answers():
    """Early or late, the rest is predicted from there."""
    queue = Queue()
    first, second = place(1.0), place(2.0)
    queue.add(first, second)
    queue.answer(first, 0.5)
    assert queue.queue.end_s(0.5) == pytest.approx(2.5)
    assert queue.queue.end_s(1.5) == pytest.approx(2.5)


def test_one_that_nobody_observes_is_gone_at_its_predicted_end():
    """And the next one has been running since then; releasing it later is harmless."""
    queue = Queue()
    unseen, next_one = place(1.0, observed=False), place(2.0)
    queue.add(unseen, next_one)
    assert queue.queue.expire(0.9) is False
    assert queue.queue.expire(1.5) is True
    assert len(queue.queue) == 1
    assert queue.queue.end_s(1.5) == pytest.approx(3.0)
    queue.answer(unseen, 2.0)
    assert len(queue.queue) == 1


def test_tokens_are_of_those_in_the_queue():
    """Out again with their place."""
    queue = Queue()
    first, second = place(1.0, 300), place(1.0, 20)
    queue.add(first, second)
    assert queue.queue.tokens == 320
    queue.cancel(first, 0.1)
    queue.cancel(second, 0.2)
    assert queue.queue.tokens == 0


# --- what it tells ---


def test_each_answer_is_timed_from_its_turn():
    """Placed together at 0, answered at 1.2 and 3.0: 1.2 s and 1.8 s."""
    queue = Queue()
    first, second = place(1.0, 100), place(2.0, 200)
    queue.add(first, second)
    queue.answer(first, 1.2)
    assert queue.reported == []  # another answer may still join
    queue.answer(second, 3.0)
    assert queue.reported == [(100, 1.2), (200, 1.8)]


def test_a_batch_is_reported_once_nothing_can_join_it():
    """A quarter of the next one's prediction later, without waiting for that one's answer."""
    queue = Queue()
    first, second = place(1.0, 100), place(2.0, 200)
    queue.add(first, second)
    queue.answer(first, 1.0)
    queue.queue.settle(1.4)
    assert queue.reported == []
    queue.queue.settle(1.5)
    assert queue.reported == [(100, 1.0)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_answers_that_come_together_were_computed_together(order: tuple[int, int, int]):
    """In one step, whatever the order in which they arrive; sums over them, from the first one's turn to the last."""
    queue = Queue()
    places = [place(0.1, 10), place(0.1, 20), place(0.1, 30)]
    queue.add(*places)
    for milliseconds, index in enumerate(order):
        queue.answer(places[index], 0.1 + milliseconds / 1000)
    assert queue.reported == [(60, 0.102)]
    assert queue.batches[0].attention == 120


def test_what_ran_beside_is_the_mean_of_begin_and_end():
    """2 streams and 1,000 tokens at the start, 4 and 3,000 at the end."""
    queue = Queue()
    one = place(1.0)
    queue.add(one, beside=Beside(2, 1000))
    queue.answer(one, 1.0, Beside(4, 3000))
    assert queue.batches[0].mean == Beside(3, 2000)


@pytest.mark.parametrize(
    ("before", "leaves"),
    [
        pytest.param(place(1.0), "cancelled", id="predecessor-cancelled"),
        pytest.param(place(1.0, observed=False), "answered", id="predecessor-unseen"),
        pytest.param(place(0.5, observed=False), "expired", id="predecessor-expired"),
    ],
)
def test_a_start_that_is_unclear_is_not_reported(before: Place, leaves: str):
    """Nobody knows when the engine began with the second one."""
    queue = Queue()
    second = place(1.0)
    queue.add(before, second)
    if leaves == "cancelled":
        queue.cancel(before, 0.5)
    elif leaves == "answered":
        queue.answer(before, 0.5)
    queue.answer(second, 2.0)
    assert queue.reported == []


@pytest.mark.parametrize(("starts_s", "reported"), [(1.4, []), (1.6, [(100, 1.0)])])
def test_after_an_abort_the_engine_may_be_busy_for_a_while(starts_s: float, reported: list[tuple[int, float]]):
    """A prefill of 1 s given up at 0.5: what starts within a second of that is not reported."""
    queue = Queue()
    gone, one = place(1.0), place(1.0)
    queue.add(gone)
    queue.cancel(gone, 0.5)
    queue.add(one, now_s=starts_s)
    queue.answer(one, starts_s + 1.0)
    assert queue.reported == reported


def test_a_cancelled_one_says_nothing():
    """Nor one that failed."""
    queue = Queue()
    one = place(1.0)
    queue.add(one)
    queue.cancel(one, 1.0)
    assert queue.reported == []


def test_one_that_nobody_counted_says_nothing():
    """0 tokens: the tokenizer failed."""
    queue = Queue()
    one = place(1.0, tokens=0)
    queue.add(one)
    queue.answer(one, 1.0)
    assert queue.reported == []


def test_one_that_is_overtaken_says_nothing():
    """Nor does the one that overtakes it: each had only part of the engine."""
    queue = Queue()
    slow, quick, third = place(1.0, 100), place(0.1, 10), place(0.5, 50)
    queue.add(slow, quick, third)
    queue.answer(quick, 0.2)
    queue.answer(slow, 1.1)
    queue.answer(third, 1.6)
    assert queue.reported == [(50, 0.5)]


def test_another_process_makes_a_doubt_of_what_has_begun():
    """Its speed is not the one of before."""
    queue = Queue()
    first, second = place(1.0, 100), place(1.0, 200)
    queue.add(first, second)
    queue.queue.doubt()
    queue.answer(first, 1.0)
    queue.answer(second, 2.0)
    assert queue.reported == [(200, 1.0)]

"""Streams: what runs on a target, how far it is, and how much later than predicted it may end."""

from __future__ import annotations

import math
import random

import pytest

from disagg_router.model import Slo, Target
from disagg_router.routing.streams import Stream, StreamBook
from disagg_router.view import StreamLoad
from tests.builders import target
from tests.fakes.costs import FixedCosts

D0, D1 = target("d0"), target("d1")
SLO = Slo(ttft_s=1.0, tpot_s=0.03, max_gap_s=0.5)  # a step takes 0.02 s


class Book:
    def __init__(self) -> None:
        self.touched: set[Target] = set()
        self.streams = StreamBook(FixedCosts(), self.touched)

    def open(
        self,
        one: Target = D0,
        *,
        slo: Slo = SLO,
        prompt: int = 100,
        expected: float = 11,
        limit: int | None = None,
        now_s: float = 0.0,
    ) -> Stream:
        return self.streams.open(
            one, slo, prompt_tokens=prompt, expected_tokens=expected, max_tokens=limit, now_s=now_s
        )


def emit(stream: Stream, tokens: int, *, until_s: float, start_s: float = 0.0) -> None:
    """Evenly spaced."""
    for index in range(1, tokens + 1):
        stream.count(1, start_s + (until_s - start_s) * index / tokens)


def test_what_runs_is_counted():
    """Contexts are prompts and answers so far."""
    book = Book()
    first, second = book.open(prompt=100, expected=11), book.open(prompt=200, expected=21)
    first.count(3, 0.1)
    load = book.streams.load(D0, 0.2)
    assert (load.running, load.context_tokens, load.to_come_tokens) == (2, 303, (8 + 21) / 2)
    assert book.streams.beside(D0) == (2, 303)
    second.close()
    second.close()
    assert book.streams.load(D0, 0.2).context_tokens == 103
    first.close()
    assert book.streams.load(D0, 0.2) == StreamLoad()
    assert book.streams.beside(D0) == (0, 0)
    assert book.streams.by_target() == ()


@pytest.mark.parametrize(
    ("expected", "limit", "so_far", "to_come"),
    [
        (11, None, 4, 7),
        (11, None, 9, 3),  # it may always be three more
        (11, None, 40, 3),
        (11, 12, 10, 2),  # unless it may not
        (11, 12, 12, 0),
    ],
)
def test_what_is_to_come(expected: float, limit: int | None, so_far: int, to_come: float):
    """What was expected less what is there."""
    book = Book()
    book.open(expected=expected, limit=limit).count(so_far, 0.1)
    assert book.streams.load(D0, 0.2).to_come_tokens == to_come


@pytest.mark.parametrize(
    ("tokens", "elapsed_s", "bin_"),
    [
        # 11 tokens at 30 ms from the first to the last: 0.3 s. After 1 token 10 are to come, in 0.2 s: 0.1 s is left.
        (1, 0.01, 2),  # 0.09 s
        (1, 0.06, 1),  # 0.04 s
        (1, 0.11, 0),  # late by 0.01 s
        (1, 0.17, 0),  # by 0.07 s, within a quarter of 0.3 s
        (1, 0.18, None),  # by 0.08 s: lost
        (6, 0.09, 3),  # 5 to come in 0.1 s, and 0.21 s left for them
        (6, 0.11, 2),
    ],
)
def test_slack(tokens: int, elapsed_s: float, bin_: int | None):
    """Upper edges 0, 0.05, 0.1, 0.25, 0.5, 1, 2.5 s."""
    book = Book()
    book.open().count(tokens, elapsed_s)
    slack = book.streams.load(D0, elapsed_s).slack
    assert slack == tuple(int(index == bin_) for index in range(8))


def test_slack_is_of_every_stream():
    """A long answer with a loose objective beside a short tight one."""
    book = Book()
    book.open(slo=Slo(1.0, 0.1, 0.5), expected=101)  # 101 steps of 20 ms in 10 s
    book.open(expected=11)
    assert book.streams.load(D0, 0.0).slack == (0, 0, 1, 0, 0, 0, 0, 1)


def test_a_long_pause_breaks_a_stream():
    """One that is over, or one that still lasts; the tightest objective is among those unbroken."""
    book = Book()
    emit(book.open(), 2, until_s=1.2)  # pauses of 0.6 s
    emit(book.open(slo=Slo(1.0, 0.03, 0.7)), 2, until_s=1.2)
    emit(book.open(slo=Slo(1.0, 0.03, 2.0)), 2, until_s=1.2)
    load = book.streams.load(D0, 1.2)
    assert (load.unbroken, load.gap_s) == (2, 0.7)
    load = book.streams.load(D0, 2.0)
    assert (load.unbroken, load.gap_s) == (1, 2.0)
    load = book.streams.load(D0, 9.0)
    assert (load.unbroken, load.gap_s) == (0, math.inf)


def test_a_stream_that_comes_or_goes_shows_at_once():
    """Without a look at all the others, which keep what the last look found for a tenth of a second."""
    book = Book()
    book.open(expected=11)
    assert book.streams.load(D0, 1.0).slack == (0,) * 8
    other = book.open(expected=11, now_s=1.0)
    assert book.touched == {D0}
    assert book.streams.load(D0, 1.05).slack == (0, 0, 1, 0, 0, 0, 0, 0)
    other.close()
    assert book.streams.load(D0, 1.06).slack == (0,) * 8


@pytest.mark.parametrize(("streams", "age_s", "anew"), [(1, 0.09, False), (1, 0.11, True), (1200, 0.49, False)])
def test_a_look_is_good_for_longer_where_there_are_many(streams: int, age_s: float, anew: bool):
    """It costs some time for each of them."""
    book = Book()
    opened = [book.open() for _ in range(streams)]
    before = book.streams.load(D0, 0.0)
    for stream in opened:
        stream.count(1, 0.01)
    assert (book.streams.load(D0, age_s) is not before) is anew


def test_many_streams_leave_nothing_behind():
    """1,000 of them, opened, counted and closed in any order."""
    book, rng = Book(), random.Random(2)
    opened: list[Stream] = []
    for step in range(1000):
        now_s = step / 100
        opened.append(book.open(rng.choice([D0, D1]), expected=rng.random() * 100, now_s=now_s))
        for stream in rng.sample(opened, min(5, len(opened))):
            stream.count(rng.randrange(4), now_s)
        if rng.random() < 0.1:
            book.streams.look(now_s)
        while opened and rng.random() < 0.5:
            opened.pop(rng.randrange(len(opened))).close()
    contexts = [book.streams.beside(one).context_tokens for one in (D0, D1)]
    assert sum(contexts) == sum(stream.context_tokens for stream in opened)
    for stream in opened:
        stream.close()
    assert book.streams.by_target() == ()
    assert book.streams.load(D0, 100.0) == book.streams.load(D1, 100.0) == StreamLoad()


def test_following_is_counting_many_at_once():
    """200 random answers, followed every tenth of a second: a policy sees what counting each token shows."""
    rng, counted, followed = random.Random(4), Book(), Book()
    both: list[tuple[Stream, Stream]] = []
    for tick in range(200):
        now_s, one, expected, limit = tick / 10, rng.choice([D0, D1]), rng.random() * 60, rng.choice([None, 40])
        each, other = [book.open(one, expected=expected, limit=limit, now_s=now_s) for book in (counted, followed)]
        both.append((each, other))
        events = sorted((now_s + rng.random() / 10, rng.randrange(len(both))) for _ in range(4 * len(both)))
        for at_s, place in events:
            both[place][0].count(1, at_s)
        for each, other in both:
            other.follow(each.tokens, each.last_s, each.max_gap_s)
        for target_ in (D0, D1):
            assert counted.streams.load(target_, now_s + 0.1) == followed.streams.load(target_, now_s + 0.1)
            assert counted.streams.beside(target_) == followed.streams.beside(target_)
        for counts, follows in zip(counted.streams.by_target(), followed.streams.by_target(), strict=True):
            assert counts.last_s == follows.last_s
        if rng.random() < 0.7:
            for stream in both.pop(rng.randrange(len(both))):
                stream.close()
    assert len(both) > 20

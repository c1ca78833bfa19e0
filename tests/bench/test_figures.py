"""What is read off a round, and the statistics of a comparison, worked out by hand."""

from __future__ import annotations

import random

import pytest

from disagg_router.bench.exchange import Outcome
from disagg_router.bench.figures import (
    MEASURES,
    Interval,
    RoundFigures,
    bootstrap,
    nearest_rank,
    read_round,
    verdicts,
)
from disagg_router.bench.load import RoundLog
from disagg_router.bench.report import as_data, comparison

GAP, TTFT, CHATS = MEASURES


def outcome(sent_s, *event_s, ended_s=None, status: int | None = 200, complete=True, given_up=False):
    return Outcome(sent_s, event_s[-1] if ended_s is None else ended_s, status, event_s, complete, given_up)


def log(*chats, longs=(), end_s=10.0):
    return RoundLog(begun_s=0.0, end_s=end_s, chats=chats, longs=tuple(longs), cpu_share=0.03)


def figures(gap=30.0, ttft=50.0, chats=400, long_done=16, refused=0, failed=0):
    return RoundFigures(gap, ttft, chats, 16, long_done, 900.0, refused, failed, 0.03)


# --- a round ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chats", "longest_gap_ms", "ttft_p99_ms", "done"),
    [
        ([outcome(0, 1, 1.25, 1.5), outcome(2, 2.5, 3.25)], 750, 1000, 2),
        ([outcome(0, 1, 1.25), outcome(10.5, 15, 19)], 250, 1000, 1),  # sent after the end: not counted
        ([outcome(9, 9.5, 9.75, 10.5)], 750, 500, 0),  # done after the end; its last gap began before
        ([outcome(9, 9.5, 10.25, 12)], 750, 500, 0),  # the gap from 10.25 on began after the end
        ([outcome(9, 9.5, ended_s=11, complete=False, given_up=True)], 1500, 500, 0),
        ([outcome(9, ended_s=12, complete=False, given_up=True)], 10_000, 3000, 0),  # no token in the whole round
        ([outcome(0, 1, 1.5), outcome(2, ended_s=2, status=429, complete=False)], 500, 1000, 1),
        ([outcome(0, 1, 1.5), outcome(2, 9, 9.25, complete=False)], 500, 1000, 1),  # cut: its TTFT is none
        ([], 10_000, 10_000, 0),
    ],
)
def test_chats_are_those_sent_within_the_round(chats, longest_gap_ms, ttft_p99_ms, done):
    """Gaps count where they begin; what was given up counts with the time it had taken."""
    found = read_round(log(*chats))
    assert (found.longest_gap_ms, found.chat_ttft_p99_ms, found.chats_done) == (longest_gap_ms, ttft_p99_ms, done)


def test_long_prompts_count_when_they_are_whole_however_late():
    """Their TTFT is the median of those that got a token."""
    longs = [
        outcome(1, 2, 3),
        outcome(8, 11, 14),
        outcome(9, 14, ended_s=25, complete=False, given_up=True),
        outcome(5, ended_s=5, status=503, complete=False),
        outcome(6, ended_s=6, status=None, complete=False),
    ]
    found = read_round(log(longs=longs))
    assert (found.long_sent, found.long_done, found.long_ttft_p50_ms) == (5, 2, 3000)
    assert (found.refused, found.failed) == (1, 1)


# --- statistics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3, 1, 2], 0.5, 2), ([4, 3, 2, 1], 0.5, 2), (range(1, 101), 0.99, 99), (range(1, 70), 0.99, 69), ([7], 0.01, 7)],
)
def test_nearest_rank(values, share, expected):
    """The smallest value that at least that share does not exceed."""
    assert nearest_rank(list(values), share) == expected


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([5, 5, 5], Interval(5, 5, 5)),
        ([0, 10], Interval(5, 0, 10)),  # the means 0, 5 and 10 come with probability 1/4, 1/2, 1/4
        # The odd one is drawn k times with binomial(6, 1/6): P(k=0) = 0.33, P(k<=2) = 0.94, P(k<=3) = 0.99.
        ([0, 0, 0, 0, 0, 6], Interval(1, 0, 3)),
    ],
)
def test_bootstrap(differences, expected):
    """Of the mean, 5 % cut off on each side."""
    assert bootstrap(differences, random.Random(1)) == expected


@pytest.mark.parametrize(
    ("mine", "theirs", "holds"),
    [
        ({}, {}, [True, True, True, True, True]),
        ({"gap": 31.0}, {}, [False, True, True, True, True]),
        ({"gap": 29.0, "ttft": 51.0}, {}, [True, False, True, True, True]),
        ({"chats": 401}, {}, [True, True, True, True, True]),
        ({"chats": 399}, {}, [True, True, False, True, True]),
        ({"long_done": 15}, {}, [True, True, True, False, True]),  # 0.95 of 16 is 15.2
        ({"refused": 1}, {}, [True, True, True, True, False]),
        ({}, {"failed": 1}, [True, True, True, True, False]),  # who turns work away has it easier: no comparison
    ],
)
def test_verdicts_on_steady_rounds(mine, theirs, holds):
    """Each measure has its better side."""
    rounds = {"break_even": [figures(**mine)] * 6, "other": [figures(**theirs)] * 6}
    assert [verdict.holds for verdict in verdicts(rounds, "break_even", seed=1)] == holds


def test_a_difference_that_the_rounds_do_not_agree_on_is_none():
    """Worse by 12 in one round of six is within the interval, by 12 in every round it is not."""
    steady = [figures()] * 6
    once = [*[figures()] * 5, figures(gap=42.0)]
    always = [figures(gap=42.0)] * 6
    assert verdicts({"break_even": once, "other": steady}, "break_even", seed=1)[0].holds
    assert not verdicts({"break_even": always, "other": steady}, "break_even", seed=1)[0].holds


def test_each_measure_is_compared_with_the_best_at_it():
    """Which may be another contender each time."""
    rounds = {
        "break_even": [figures(gap=30.0, chats=450)] * 3,
        "smooth": [figures(gap=20.0, chats=300)] * 3,
        "fast": [figures(gap=90.0, chats=440)] * 3,
    }
    gap, _, chats, *_ = verdicts(rounds, "break_even", seed=1)
    assert "(smooth) 20" in gap.sentence
    assert not gap.holds
    assert "(fast) 440" in chats.sentence
    assert chats.holds


def test_the_report_has_every_contender_and_every_difference():
    """As a table and as data; without the subject there are no differences to show."""
    rounds = {"break_even": [figures()] * 2, "other": [figures(gap=40.0)] * 2}
    judged = verdicts(rounds, "break_even", seed=1)
    data = as_data(rounds, "break_even", judged, seed=1)
    assert data["holds"]
    assert data["medians"]["other"][GAP.name] == 40
    assert data["differences"]["other"][GAP.name] == {"mean": -10, "low": -10, "high": -10}
    alone = {"other": rounds["other"]}
    assert as_data(alone, "break_even", [], seed=1)["differences"] == {}
    for shown in (rounds, alone):
        comparison(shown, "break_even", judged, seed=1)

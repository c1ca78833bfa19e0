"""What is read off a round, and how two contenders are compared over several."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from disagg_router.bench.exchange import Outcome
from disagg_router.bench.load import RoundLog

RESAMPLES = 10_000
LEVEL = 0.9  # of the interval
LONG_DONE_SHARE = 0.95  # of the most that anybody got done


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """Chats are those sent within the round. `chats_done`: complete within it; `long_done`: complete in the end.
    `long_ttft_p50_ms` is None where no long prompt got a token."""

    longest_gap_ms: float
    chat_ttft_p99_ms: float
    chats_done: int
    long_sent: int
    long_done: int
    long_ttft_p50_ms: float | None
    refused: int
    failed: int
    load_cpu_share: float


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that is compared."""

    name: str
    title: str
    higher_is_better: bool = False

    def better(self, values: Mapping[str, float]) -> str:
        """The name with the best value."""
        return (max if self.higher_is_better else min)(values, key=values.__getitem__)


MEASURES = (
    Measure("longest_gap_ms", "longest gap, ms"),
    Measure("chat_ttft_p99_ms", "chat TTFT p99, ms"),
    Measure("chats_done", "chats done", higher_is_better=True),
)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and where it lies with probability LEVEL."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    holds: bool
    sentence: str


Rounds = Mapping[str, Sequence[RoundFigures]]  # contender -> its rounds, in the same order for all


def read_round(log: RoundLog) -> RoundFigures:
    """What was still running when it was given up counts with the time it had taken by then; where no chat got a
    token, the whole round was one wait."""
    round_ms = (log.end_s - log.begun_s) * 1000
    chats = [one for one in log.chats if one.sent_s < log.end_s]
    gaps_s = [gap_s for one in chats for gap_s in _gaps_s(one, log.end_s)]
    ttfts_s = [_ttft_s(one) for one in chats if not (one.refused or one.failed)]
    long_ttfts_s = [one.event_s[0] - one.sent_s for one in log.longs if one.event_s]
    return RoundFigures(
        longest_gap_ms=max(gaps_s) * 1000 if gaps_s else round_ms,
        chat_ttft_p99_ms=nearest_rank(ttfts_s, 0.99) * 1000 if ttfts_s else round_ms,
        chats_done=sum(one.complete and one.ended_s <= log.end_s for one in chats),
        long_sent=len(log.longs),
        long_done=sum(one.complete for one in log.longs),
        long_ttft_p50_ms=median(long_ttfts_s) * 1000 if long_ttfts_s else None,
        refused=sum(one.refused for one in (*chats, *log.longs)),
        failed=sum(one.failed for one in (*chats, *log.longs)),
        load_cpu_share=log.cpu_share,
    )


def nearest_rank(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def bootstrap(differences: Sequence[float], rng: random.Random) -> Interval:
    """Percentile bootstrap of the mean (Efron 1979): rounds drawn with replacement, the middle LEVEL of it kept."""
    means = sorted(fmean(rng.choices(differences, k=len(differences))) for _ in range(RESAMPLES))
    tail = (1 - LEVEL) / 2
    return Interval(fmean(differences), nearest_rank(means, tail), nearest_rank(means, 1 - tail))


def values(rounds: Sequence[RoundFigures], measure: Measure) -> list[float]:
    return [float(getattr(one, measure.name)) for one in rounds]


def difference(rounds: Rounds, subject: str, other: str, measure: Measure, rng: random.Random) -> Interval:
    """Subject less other, round by round: both had the same arrivals there."""
    mine, theirs = values(rounds[subject], measure), values(rounds[other], measure)
    return bootstrap([a - b for a, b in zip(mine, theirs, strict=True)], rng)


def verdicts(rounds: Rounds, subject: str, seed: int) -> list[Verdict]:
    """One for each measure, one for the long prompts, one for what was turned away."""
    others = [name for name in rounds if name != subject]
    compared = [_compared(rounds, subject, others, measure, random.Random(seed)) for measure in MEASURES]
    return [*compared, _long_done(rounds, subject), _none_lost(rounds)]


def _compared(rounds: Rounds, subject: str, others: Sequence[str], measure: Measure, rng: random.Random) -> Verdict:
    best = measure.better({name: median(values(rounds[name], measure)) for name in others})
    found = difference(rounds, subject, best, measure, rng)
    holds = found.high >= 0 if measure.higher_is_better else found.low <= 0
    mine, theirs = (median(values(rounds[name], measure)) for name in (subject, best))
    return Verdict(
        holds,
        f"{measure.title}: {subject} {mine:.0f}, the best other ({best}) {theirs:.0f}; "
        f"difference {found.mean:+.0f}, {LEVEL:.0%} within [{found.low:+.0f}, {found.high:+.0f}]",
    )


def _long_done(rounds: Rounds, subject: str) -> Verdict:
    done = {name: sum(one.long_done for one in figures) for name, figures in rounds.items()}
    best = max(done, key=done.__getitem__)
    return Verdict(
        done[subject] >= LONG_DONE_SHARE * done[best],
        f"long prompts done: {subject} {done[subject]}, the most ({best}) {done[best]}; "
        f"wanted {LONG_DONE_SHARE:g} of that",
    )


def _none_lost(rounds: Rounds) -> Verdict:
    """By any contender: one that turns work away has an easier time with the rest."""
    lost = {name: sum(one.refused + one.failed for one in figures) for name, figures in rounds.items()}
    who = ", ".join(f"{name} {count}" for name, count in lost.items() if count)
    return Verdict(not who, f"refused or failed: {who or 'none'}")


def _gaps_s(one: Outcome, end_s: float) -> list[float]:
    """Between tokens, those that began within the round; the last one may have been cut short by giving up."""
    times_s = (*one.event_s, one.ended_s) if one.given_up and one.event_s else one.event_s
    return [later_s - earlier_s for earlier_s, later_s in pairwise(times_s) if earlier_s < end_s]


def _ttft_s(one: Outcome) -> float:
    return (one.event_s[0] if one.event_s else one.ended_s) - one.sent_s

"""What a decision log tells: which paths and why, how good the predictions were, which objectives were met."""

from __future__ import annotations

import math
import os
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from disagg_router.errors import ConfigError
from disagg_router.observability.decisions import DecisionLine
from disagg_router.observability.metrics import TTFT_ERROR_EDGES
from disagg_router.observability.requests import REJECTIONS

WORST = 5


@dataclass(frozen=True, slots=True)
class DecisionCount:
    path: str
    reason: str
    requests: int
    share: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of the predicted TTFT, over `requests` that have both. Ratios are measured / predicted; `error_p50` is the
    median of |measured - predicted| / measured."""

    requests: int
    ratio_p50: float
    ratio_p90: float
    error_p50: float


@dataclass(frozen=True, slots=True)
class Attainment:
    """Share of the requests that met an objective, of those where it could be measured; None where it never could.

    `all`: of every request, those that succeeded and missed none.
    """

    ttft: float | None
    tpot: float | None
    max_gap: float | None
    all: float


@dataclass(frozen=True, slots=True)
class PathSummary:
    path: str
    requests: int
    share: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    accuracy: Accuracy | None
    attainment: Attainment


@dataclass(frozen=True, slots=True)
class OtherArm:
    """Of the `decisions` that compared paths, the share where another one's predicted TTFT was better than that of
    the path taken by more than the other's standard deviation."""

    decisions: int
    better: float | None


@dataclass(frozen=True, slots=True)
class Rejection:
    code: str
    requests: int
    early: int


@dataclass(frozen=True, slots=True)
class Misprediction:
    request_id: str
    path: str
    reason: str
    predicted_s: float
    measured_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class RatioBin:
    """How many measured / predicted ratios are at most `up_to` (None: any) and above the bin before."""

    up_to: float | None
    requests: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Most frequent first; `worst` by how many times too early or too late."""

    requests: int
    unreadable_lines: int
    first_at_s: float
    last_at_s: float
    decisions: list[DecisionCount]
    paths: list[PathSummary]
    other_arm: OtherArm
    rejections: list[Rejection]
    worst: list[Misprediction]
    ratios: list[RatioBin]


def read_decisions(path: str | os.PathLike[str]) -> tuple[list[DecisionLine], int]:
    """The lines of a decision log, and how many cannot be read: the last one may have been cut off.

    Raises ConfigError, also when there is none.
    """
    decoder = msgspec.json.Decoder(DecisionLine)
    found: list[DecisionLine] = []
    unreadable = 0
    try:
        with open(path, "rb") as file:
            for line in filter(bytes.strip, file):
                try:
                    found.append(decoder.decode(line))
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    unreadable += 1
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror or exc}") from exc
    if not found and unreadable:
        raise ConfigError(f"{path} is no decision log: not one of its {unreadable} lines can be read as one")
    if not found:
        raise ConfigError(f"{path} is empty: serve some requests with the decision log switched on first")
    return found, unreadable


def summarise(lines: Sequence[DecisionLine], unreadable_lines: int = 0) -> Summary:
    """`lines` must not be empty."""
    by_path = defaultdict(list)
    for line in lines:
        by_path[line.path].append(line)
    reasons = Counter((line.path, line.reason or "none") for line in lines)
    times_s = [line.at_s for line in lines]
    return Summary(
        requests=len(lines),
        unreadable_lines=unreadable_lines,
        first_at_s=min(times_s),
        last_at_s=max(times_s),
        decisions=[DecisionCount(*key, count, count / len(lines)) for key, count in reasons.most_common()],
        paths=[
            _of_path(path, its, len(lines)) for path, its in sorted(by_path.items(), key=lambda item: -len(item[1]))
        ],
        other_arm=_other_arm(lines),
        rejections=_rejections(lines),
        worst=sorted(_mispredictions(lines), key=lambda it: -abs(math.log(it.ratio)))[:WORST],
        ratios=_bins([it.ratio for it in _mispredictions(lines)]),
    )


def _of_path(path: str, lines: Sequence[DecisionLine], of_requests: int) -> PathSummary:
    ttfts_s = [line.ttft_s for line in lines if line.ttft_s is not None]
    pairs = _mispredictions(lines)
    ratios = [it.ratio for it in pairs]
    accuracy = None
    if pairs:
        errors = [abs(it.measured_s - it.predicted_s) / it.measured_s for it in pairs]
        accuracy = Accuracy(len(pairs), _percentile(ratios, 50), _percentile(ratios, 90), _percentile(errors, 50))
    return PathSummary(
        path=path,
        requests=len(lines),
        share=len(lines) / of_requests,
        ttft_p50_s=_percentile(ttfts_s, 50) if ttfts_s else None,
        ttft_p99_s=_percentile(ttfts_s, 99) if ttfts_s else None,
        accuracy=accuracy,
        attainment=Attainment(
            ttft=_share([line.met.ttft for line in lines]),
            tpot=_share([line.met.tpot for line in lines]),
            max_gap=_share([line.met.max_gap for line in lines]),
            all=sum(map(_good, lines)) / len(lines),
        ),
    )


def _good(line: DecisionLine) -> bool:
    return line.outcome == "ok" and False not in (line.met.ttft, line.met.tpot, line.met.max_gap)


def _mispredictions(lines: Sequence[DecisionLine]) -> list[Misprediction]:
    """Of every request that has a predicted and a measured TTFT."""
    found = []
    for line in lines:
        predicted = line.predicted.get(line.path)
        predicted_s, measured_s = (predicted.mean_s if predicted else None) or 0.0, line.ttft_s or 0.0
        if predicted_s > 0.0 and measured_s > 0.0:
            reason, ratio = line.reason or "none", measured_s / predicted_s
            found.append(Misprediction(line.request_id, line.path, reason, predicted_s, measured_s, ratio))
    return found


def _other_arm(lines: Sequence[DecisionLine]) -> OtherArm:
    compared = better = 0
    for line in lines:
        taken = line.predicted.get(line.path)
        others = [it for path, it in line.predicted.items() if path != line.path and it.mean_s is not None]
        if taken is None or taken.mean_s is None or not others:
            continue
        compared += 1
        better += any((it.mean_s or 0.0) + (it.sd_s or 0.0) < taken.mean_s for it in others)
    return OtherArm(compared, better / compared if compared else None)


def _rejections(lines: Sequence[DecisionLine]) -> list[Rejection]:
    refused = [line for line in lines if line.outcome in REJECTIONS]
    early = Counter(line.outcome for line in refused if line.rejected_early)
    return [Rejection(code, n, early[code]) for code, n in Counter(line.outcome for line in refused).most_common()]


def _bins(ratios: Sequence[float]) -> list[RatioBin]:
    """Edges are inside their bins, as in the metric of the same numbers."""
    counts = Counter(bisect_left(TTFT_ERROR_EDGES, ratio) for ratio in ratios)
    return [RatioBin(edge, counts[place]) for place, edge in enumerate((*TTFT_ERROR_EDGES, None))]


def _share(met: Sequence[bool | None]) -> float | None:
    measured = [it for it in met if it is not None]
    return sum(measured) / len(measured) if measured else None


def _percentile(values: Sequence[float], percent: int) -> float:
    """Linear between the two nearest values, like numpy's."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]

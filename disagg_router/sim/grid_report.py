"""What the grid shows: break_even against the best baseline in each cell and at each rate, and if that is enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from disagg_router.sim.grid_cells import Contender, subject
from disagg_router.sim.grid_runs import Result
from disagg_router.sim.grid_search import RATES, CellRuns

RESAMPLES = 2000
TOGETHER = 50  # requests that follow each other fare alike, so they are drawn together
LEVEL = 0.95
LEAST_UPPER = 0.97
LEAST_MEAN = 1.0
LEAST_UNGUARDED_MEAN = 1.12
LEAST_FIXED_MEAN = 1.05


@dataclass(frozen=True, slots=True)
class Ratio:
    """break_even's goodput over another's, with a one-sided bound of LEVEL on each side."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Compared:
    """At one rate. `best` is the best of the finalists there; `without` that of those without admission."""

    factor: float
    rate_rps: float
    attainment: Mapping[str, float]
    best: str
    ratio: Ratio
    without: str
    without_attainment: float
    without_ratio: Ratio
    failed: int

    @property
    def holds(self) -> bool:
        return self.ratio.high >= LEAST_UPPER


@dataclass(frozen=True, slots=True)
class CellReport:
    name: str
    near_zero_attainment: float
    knee_rps: float
    rates: tuple[Compared, ...]


@dataclass(frozen=True, slots=True)
class FixedReport:
    """One hardware: the fixed configuration that does best over all its cells, and break_even over it."""

    hardware: str
    contender: str
    mean_ratio: float


@dataclass(frozen=True, slots=True)
class Verdict:
    sentence: str
    holds: bool


@dataclass(frozen=True, slots=True)
class GridReport:
    cells: tuple[CellReport, ...]
    fixed: tuple[FixedReport, ...]

    def verdicts(self) -> list[Verdict]:
        rates = [(cell, at) for cell in self.cells for at in cell.rates]
        missing = [f"{cell.name} at {at.factor:g}" for cell, at in rates if not at.holds]
        mean = geometric_mean(at.ratio.value for _, at in rates)
        unguarded = geometric_mean(at.without_ratio.value for _, at in rates)
        failed = sum(at.failed for _, at in rates)
        return [
            Verdict(
                f"{len(rates) - len(missing)} of {len(rates)} cells and rates have an upper bound >= {LEAST_UPPER}"
                + (f"; not: {', '.join(missing)}" if missing else ""),
                not missing,
            ),
            _at_least("geometric mean against the best baseline with the same admission", mean, LEAST_MEAN),
            _at_least("geometric mean against the best without admission", unguarded, LEAST_UNGUARDED_MEAN),
            *(
                _at_least(f"{one.hardware}: against {one.contender} everywhere", one.mean_ratio, LEAST_FIXED_MEAN)
                for one in self.fixed
            ),
            Verdict(f"{failed} requests failed", not failed),
        ]


def compared(found: CellRuns) -> CellReport:
    return CellReport(
        found.cell.name,
        found.near_zero_attainment,
        found.knee_rps,
        tuple(_at(found, factor) for factor in RATES),
    )


def fixed(cells: Sequence[CellRuns], candidates: Iterable[Contender]) -> FixedReport:
    """Of the cells of one hardware, in all of which the candidates have finals."""

    def over(contender: Contender) -> float:
        pairs = [
            (one.finals[factor, True, subject(one.cell)], one.finals[factor, True, contender])
            for one in cells
            for factor in RATES
        ]
        return geometric_mean(_good(mine) / _good(theirs) for mine, theirs in pairs)

    means = {contender: over(contender) for contender in candidates}
    best = min(means, key=means.__getitem__)
    return FixedReport(cells[0].cell.hardware.name, best.name, means[best])


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(fmean(math.log(value) for value in values))


def ratio(mine: Sequence[Result], theirs: Sequence[Result]) -> Ratio:
    """Bootstrap over requests within paired seeds: both had the same requests, so what is drawn is drawn for both."""
    rng = np.random.default_rng(0)
    mine_drawn, theirs_drawn = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for ours, other in zip(mine, theirs, strict=True):
        ours_sums, other_sums = _sums(ours), _sums(other)
        drawn = rng.integers(len(ours_sums), size=(RESAMPLES, len(ours_sums)))
        mine_drawn += ours_sums[drawn].sum(axis=1)
        theirs_drawn += other_sums[drawn].sum(axis=1)
    ratios = np.maximum(mine_drawn, 1) / np.maximum(theirs_drawn, 1)
    low, high = np.quantile(ratios, [1 - LEVEL, LEVEL])
    return Ratio(_good(mine) / _good(theirs), float(low), float(high))


def as_data(report: GridReport) -> dict[str, Any]:
    """For `--json`."""
    verdicts = report.verdicts()
    return {
        "holds": all(one.holds for one in verdicts),
        "verdicts": [{"says": one.sentence, "holds": one.holds} for one in verdicts],
        "fixed": [{"hardware": o.hardware, "contender": o.contender, "mean_ratio": o.mean_ratio} for o in report.fixed],
        "cells": [
            {
                "cell": cell.name,
                "near_zero_attainment": cell.near_zero_attainment,
                "rate_rps": cell.knee_rps,
                "rates": [_rate_data(at) for at in cell.rates],
            }
            for cell in report.cells
        ],
    }


def _rate_data(at: Compared) -> dict[str, Any]:
    def said(ratio: Ratio) -> dict[str, float]:
        return {"value": ratio.value, "low": ratio.low, "high": ratio.high}

    return {
        "factor": at.factor,
        "rate_rps": at.rate_rps,
        "attainment": dict(at.attainment),
        "best": at.best,
        "ratio": said(at.ratio),
        "best_without_admission": at.without,
        "ratio_without_admission": said(at.without_ratio),
        "holds": at.holds,
    }


def _at(found: CellRuns, factor: float) -> Compared:
    here = {(guarded, one): results for (at, guarded, one), results in found.finals.items() if at == factor}
    mine = here.pop((True, subject(found.cell)))
    _, best = max((key for key in here if key[0]), key=lambda key: _good(here[key]))
    _, without = max((key for key in here if not key[0]), key=lambda key: _good(here[key]))
    attainments = {one.name: _attainment(results) for (guarded, one), results in here.items() if guarded}
    return Compared(
        factor=factor,
        rate_rps=factor * found.knee_rps,
        attainment={subject(found.cell).name: _attainment(mine)} | attainments,
        best=best.name,
        ratio=ratio(mine, here[True, best]),
        without=without.name,
        without_attainment=_attainment(here[False, without]),
        without_ratio=ratio(mine, here[False, without]),
        failed=sum(result.failed for results in (mine, *here.values()) for result in results),
    )


def _good(results: Sequence[Result]) -> int:
    """At least one, so that it can be divided by. All seeds have equal spans: a ratio of these is one of goodput."""
    return max(1, sum(result.good.count("1") for result in results))


def _attainment(results: Sequence[Result]) -> float:
    return fmean(result.attainment for result in results)


def _sums(result: Result) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Good requests of each TOGETHER that follow each other."""
    flags = np.frombuffer(result.good.encode(), dtype=np.uint8).astype(np.int64) - ord("0")
    return np.add.reduceat(flags, np.arange(0, len(flags), TOGETHER))


def _at_least(what: str, value: float, least: float) -> Verdict:
    return Verdict(f"{what}: {value:.3f}, wanted >= {least:g}", value >= least)

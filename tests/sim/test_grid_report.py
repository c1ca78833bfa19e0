"""What the grid says of its simulations: ratios, bounds, verdicts, the table and the picture."""

from __future__ import annotations

import io
import math
import random

import pytest
from rich.console import Console

from disagg_router.sim.grid import likely
from disagg_router.sim.grid_cells import Contender, all_cells, subject
from disagg_router.sim.grid_report import GridReport, as_data, compared, fixed, geometric_mean, ratio
from disagg_router.sim.grid_runs import Result
from disagg_router.sim.grid_search import RATES, CellRuns
from disagg_router.sim.grid_show import draw, shown

CELL = all_cells()[0]
LOCAL, SPLIT = Contender("always_local", 8), Contender("threshold", 8, 4)


def result(good: int, of: int = 1000, failed: int = 0) -> Result:
    """As many good ones, evenly spread."""
    bits = "".join("1" if (i + 1) * good // of > i * good // of else "0" for i in range(of))
    return Result(bits, 10.0, 0, failed, {}, 1.0)


def cell_runs(mine: int, local: int, split: int, unguarded: int, failed: int = 0) -> CellRuns:
    """The same at all rates, one seed."""
    finals = {}
    for factor in RATES:
        finals[factor, True, subject(CELL)] = [result(mine, failed=failed)]
        finals[factor, True, LOCAL] = [result(local)]
        finals[factor, True, SPLIT] = [result(split)]
        finals[factor, False, LOCAL] = [result(unguarded)]
    return CellRuns(CELL, 1.0, 10.0, {True: {LOCAL: 1.0, SPLIT: 0.8}, False: {LOCAL: 1.0}}, finals)


def failures(report: GridReport) -> list[str]:
    return [one.sentence for one in report.verdicts() if not one.holds]


def test_a_ratio_is_one_of_goodput():
    """Of all seeds together: 1,300 good ones over 1,600."""
    found = ratio([result(900), result(400)], [result(800), result(800)])
    assert found.value == pytest.approx(1300 / 1600)
    assert found.low <= found.value <= found.high


def test_the_bound_is_that_of_a_paired_difference():
    """Requests that are good or not at random: the one-sided bound is 1.645 standard errors away (the delta method
    for a ratio of means), and none at all between two that had the same good ones."""
    rng = random.Random(1)
    mine, theirs = ("".join(rng.choices("01", k=20_000)) for _ in range(2))
    found = ratio([Result(mine, 1.0, 0, 0, {}, 0.0)], [Result(theirs, 1.0, 0, 0, {}, 0.0)])
    p, q = mine.count("1") / 20_000, theirs.count("1") / 20_000
    error = (p / q) * math.sqrt(((1 - p) / p + (1 - q) / q) / 20_000)
    assert found.high - found.value == pytest.approx(1.645 * error, rel=0.25)
    assert found.value - found.low == pytest.approx(1.645 * error, rel=0.25)
    same = ratio([Result(mine, 1.0, 0, 0, {}, 0.0)], [Result(mine, 1.0, 0, 0, {}, 0.0)])
    assert (same.low, same.value, same.high) == (1.0, 1.0, 1.0)


def test_the_best_baseline_is_the_best_of_the_cell_and_rate():
    """With the same admission; those without are another column."""
    at = compared(cell_runs(900, 800, 950, 500)).rates[0]
    assert (at.best, at.ratio.value) == ("threshold 4+4", pytest.approx(900 / 950))
    assert (at.without, at.without_ratio.value) == ("always_local 8", pytest.approx(900 / 500))


def test_all_holds_when_break_even_is_better():
    """Nothing is missed, and nothing is said to be."""
    found = cell_runs(960, 900, 900, 800)
    report = GridReport((compared(found),), (fixed([found], [LOCAL, SPLIT]),))
    assert failures(report) == []
    assert as_data(report)["holds"] is True


def test_what_is_missed_is_listed():
    """A cell below its bound by name and rate, each mean with its value, and failed requests."""
    found = cell_runs(900, 980, 850, 880, failed=1)
    said = failures(GridReport((compared(found),), (fixed([found], [LOCAL, SPLIT]),)))
    assert f"{CELL.name} at 0.8" in said[0]
    assert [one.rsplit(": ", 1)[-1].split(",")[0] for one in said[1:4]] == ["0.918", "1.023", "0.918"]
    assert said[4] == "3 requests failed"


def test_the_single_best_is_the_one_that_is_hardest_to_beat():
    """Over all cells, not the one that wins one of them."""
    here, there = cell_runs(900, 900, 100, 800), cell_runs(900, 700, 800, 800)
    found = fixed([here, there], [LOCAL, SPLIT])
    assert found.contender == LOCAL.name
    assert found.mean_ratio == pytest.approx(math.sqrt(900 / 700))


def test_candidates_are_good_everywhere():
    """By their scores in the races."""
    assert likely([cell_runs(1, 1, 1, 1)]) == [LOCAL, SPLIT]


def test_a_geometric_mean():
    """Of 2 and 8 it is 4."""
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_the_table_and_the_picture(tmp_path):
    """Every cell is in the table; a miss has a star; the picture is a PNG."""
    found = cell_runs(900, 980, 850, 880)
    report = GridReport((compared(found),), (fixed([found], [LOCAL]),))
    out = io.StringIO()
    Console(file=out, width=160).print(shown(report))
    assert CELL.name in out.getvalue()
    assert " *" in out.getvalue()
    draw(report, tmp_path / "grid.png")
    assert (tmp_path / "grid.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

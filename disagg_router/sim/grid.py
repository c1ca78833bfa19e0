"""`python -m disagg_router.sim.grid`: break_even with no ratio given, against the best fixed configuration per cell."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from disagg_router import command
from disagg_router.errors import ConfigError
from disagg_router.sim.grid_cells import Cell, Contender, Traffic, all_cells, matching, quick_cells, subject
from disagg_router.sim.grid_report import FixedReport, GridReport, as_data, compared, fixed, geometric_mean
from disagg_router.sim.grid_runs import Runs, TraceFigures, figures_of
from disagg_router.sim.grid_search import FULL, QUICK, CellRuns, Effort, Search
from disagg_router.sim.grid_show import draw, shown

TABLE_CELLS = 160
CANDIDATES = 2  # configurations that may be the best single one of a hardware, and are run in all its cells
WORST_SCORE = 0.01


def grid(
    out: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="A line per simulation; what is there isn't run again.")
    ] = Path(".state/grid.jsonl"),
    quick: Annotated[bool, typer.Option("--quick", help="12 cells, fewer requests; so does QUICK=1.")] = False,
    cells: Annotated[str | None, typer.Option(metavar="PATTERN", help="Those with this in their name.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at a time.")] = 2,
    traces: Annotated[Path, typer.Option(metavar="DIR", help="Where the four traces are.")] = Path("../shared/traces"),
    again: Annotated[bool, typer.Option("--again", help="Simulate break_even anew, but not the others.")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.png", help="The ratios, cell by cell.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, the table on stderr.")] = False,
) -> int:
    """break_even on unified=N against every fixed split of the same instances, with the same admission and without.

    Ends with 1 when what is to be shown does not hold. Can be stopped at any time, and goes on when it is run again.
    """
    quick = quick or os.environ.get("QUICK", "") not in ("", "0")
    chosen = matching(quick_cells() if quick else all_cells(), cells)
    if not chosen:
        raise ConfigError(f"--cells {cells!r} is in the name of no cell: try code, 70b or code/8b-h200")
    _check(traces, chosen)
    report = _measured(chosen, QUICK if quick else FULL, out, traces, jobs, again=again)
    console = Console(stderr=as_json)
    wide = Console(stderr=as_json, width=max(console.width, TABLE_CELLS))  # where there is no terminal it is cut at 80
    wide.print(shown(report), highlight=False)
    if picture is not None:
        draw(report, picture)
    if as_json:
        command.print_json(as_data(report))
    return 0 if all(one.holds for one in report.verdicts()) else 1


def _check(traces: Path, cells: Sequence[Cell]) -> None:
    """Raises ConfigError."""
    for cell in cells:
        file = traces / cell.traffic.file
        if not file.is_file():
            raise ConfigError(f"there is no trace {file}: give the folder that has it as --traces DIR")


def _measured(cells: Sequence[Cell], effort: Effort, out: Path, traces: Path, jobs: int, *, again: bool) -> GridReport:
    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[simulations]} simulations"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task("cells", total=len(cells), simulations=0)
        forget = subject(cells[0]).policy if again else None
        runs = Runs(out, traces, jobs, lambda: bars.update(bar, simulations=runs.fresh), forget)
        with runs:
            return asyncio.run(_all(cells, effort, runs, traces, jobs, bars, bar))


async def _all(
    cells: Sequence[Cell], effort: Effort, runs: Runs, traces: Path, jobs: int, bars: Progress, bar: TaskID
) -> GridReport:
    figures = {traffic: figures_of(traffic, traces) for traffic in {cell.traffic for cell in cells}}
    turns = asyncio.Semaphore(jobs)

    async def one(cell: Cell) -> CellRuns:
        async with turns:
            found = await Search(cell, runs, effort, figures[cell.traffic]).run()
        bars.advance(bar)
        return found

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(cell)) for cell in cells]
    found = [task.result() for task in tasks]
    by_hardware = [list(these) for _, these in groupby(found, key=lambda one: one.cell.hardware)]
    best_fixed: list[FixedReport] = []
    completed: list[CellRuns] = []
    for these in by_hardware:
        candidates = likely(these)
        with_candidates = [await _completed(one, candidates, runs, effort, figures) for one in these]
        best_fixed.append(fixed(with_candidates, candidates))
        completed += with_candidates
    return GridReport(tuple(compared(one) for one in completed), tuple(best_fixed))


async def _completed(
    found: CellRuns,
    candidates: Sequence[Contender],
    runs: Runs,
    effort: Effort,
    figures: Mapping[Traffic, TraceFigures],
) -> CellRuns:
    """With finals of those that did best in the races of all cells, which are then baselines of each like others."""
    search = Search(found.cell, runs, effort, figures[found.cell.traffic])
    finals = dict(found.finals)
    for contender in candidates:
        finals |= await search.final(contender, found.knee_rps, admission=True)
    return dataclasses.replace(found, finals=finals)


def likely(cells: Sequence[CellRuns]) -> list[Contender]:
    """By the geometric mean of their scores in the races with admission, which all of them were in."""
    scores = {
        contender: geometric_mean(max(WORST_SCORE, one.races[True][contender]) for one in cells)
        for contender in cells[0].races[True]
    }
    return sorted(scores, key=lambda contender: -scores[contender])[:CANDIDATES]


if __name__ == "__main__":
    command.run(grid)

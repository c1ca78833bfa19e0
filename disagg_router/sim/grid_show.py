"""The grid's table and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table

from disagg_router.sim.grid_report import LEAST_UPPER, CellReport, Compared, GridReport
from disagg_router.sim.grid_search import RATES
from disagg_router.sim.picture import new_figure, save

COLOURS = ("tab:green", "tab:blue", "tab:red")


def shown(report: GridReport) -> Group:
    """Every cell and rate, then what all of them together say."""
    verdicts = [f"{'holds ' if one.holds else 'MISSED'} {one.sentence}" for one in report.verdicts()]
    return Group(_table(report.cells), *verdicts)


def _table(cells: Sequence[CellReport]) -> Table:
    table = Table("cell", title="break_even against the best fixed configuration", title_justify="left")
    for name in ("1/s", "x", "break_even", "best"):
        table.add_column(name, justify="right")
    table.add_column("which")
    for name in ("ratio", "95 %", "no admission", "ratio"):
        table.add_column(name, justify="right")
    for cell in cells:
        table.add_section()
        for at in cell.rates:
            table.add_row(cell.name if at is cell.rates[0] else "", *_row(at))
    return table


def _row(at: Compared) -> list[str]:
    mine = next(iter(at.attainment.values()))
    interval = f"{at.ratio.low:.3f} to {at.ratio.high:.3f}" + ("" if at.holds else " *")
    return [
        f"{at.rate_rps:.3g}",
        f"{at.factor:g}",
        f"{mine:.3f}",
        f"{at.attainment[at.best]:.3f}",
        at.best,
        f"{at.ratio.value:.3f}",
        interval,
        f"{at.without_attainment:.3f}",
        f"{at.without_ratio.value:.3f}",
    ]


def draw(report: GridReport, file: Path) -> None:
    """The ratios with their intervals, a row for each cell. Raises ConfigError."""
    cells = report.cells
    figure = new_figure(11, 2 + 0.3 * len(cells))
    axes = figure.subplots()
    for i, (factor, colour) in enumerate(zip(RATES, COLOURS, strict=True)):
        found = [cell.rates[i].ratio for cell in cells]
        places = [place + 0.2 * (i - 1) for place in range(len(cells))]
        around = [[max(0.0, one.value - one.low) for one in found], [max(0.0, one.high - one.value) for one in found]]
        label = f"{factor:g} of the rate"
        axes.errorbar([one.value for one in found], places, xerr=around, fmt="o", ms=3, color=colour, label=label)
    axes.set_yticks(range(len(cells)), [cell.name for cell in cells])
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", lw=0.8)
    axes.axvline(LEAST_UPPER, color="black", lw=0.8, ls=":")
    axes.set_xlabel("goodput of break_even over that of the best fixed configuration")
    axes.legend(loc="best")
    save(figure, file)

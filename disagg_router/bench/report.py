"""What a measurement shows: the table of medians, the differences, the verdicts; and the same as plain data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg_router.bench.figures import MEASURES, Measure, RoundFigures, Rounds, Verdict, difference, values

_BAR_CELLS = 12


def comparison(rounds: Rounds, subject: str, judged: Sequence[Verdict], seed: int) -> RenderableType:
    """Medians over the rounds; below each, `subject` less this one: the mean difference and its interval."""
    table = Table(title="medians over the rounds", title_justify="left")
    table.add_column("contender")
    for measure in MEASURES:
        table.add_column(measure.title + (f"\n{subject} less it" if subject in rounds else ""), no_wrap=True)
    for title in ("long done", "long TTFT p50, ms", "refused", "failed", "load's CPU"):
        table.add_column(title, justify="right")
    for name, figures in rounds.items():
        cells = [_cell(rounds, subject, name, measure, seed) for measure in MEASURES]
        table.add_row(name, *cells, *_plain(figures))
    lines = [Text(("holds   " if one.holds else "MISSED  ") + one.sentence) for one in judged]
    return Group(table, *lines)


def as_data(rounds: Rounds, subject: str, judged: Sequence[Verdict], seed: int) -> dict[str, Any]:
    """`differences`: subject less the other, per measure."""
    return {
        "rounds": {name: [asdict(one) for one in figures] for name, figures in rounds.items()},
        "medians": {
            name: {measure.name: median(values(figures, measure)) for measure in MEASURES}
            for name, figures in rounds.items()
        },
        "differences": {
            name: {
                measure.name: asdict(difference(rounds, subject, name, measure, random.Random(seed)))
                for measure in MEASURES
            }
            for name in rounds
            if subject in rounds and name != subject
        },
        "verdicts": [asdict(one) for one in judged],
        "holds": all(one.holds for one in judged),
    }


def _cell(rounds: Rounds, subject: str, name: str, measure: Measure, seed: int) -> str:
    middle = {one: median(values(figures, measure)) for one, figures in rounds.items()}
    filled = round(_BAR_CELLS * middle[name] / (max(middle.values()) or 1))
    shown = f"{middle[name]:8.0f} {'█' * filled}"
    if subject not in rounds or name == subject:
        return f"{shown}\n"
    found = difference(rounds, subject, name, measure, random.Random(seed))
    return f"{shown}\n{found.mean:+8.0f} [{found.low:+.0f}, {found.high:+.0f}]"


def _plain(figures: Sequence[RoundFigures]) -> list[str]:
    sent, done = sum(one.long_sent for one in figures), sum(one.long_done for one in figures)
    ttfts = [one.long_ttft_p50_ms for one in figures if one.long_ttft_p50_ms is not None]
    return [
        f"{done} of {sent}",
        f"{median(ttfts):.0f}" if ttfts else "-",
        str(sum(one.refused for one in figures)),
        str(sum(one.failed for one in figures)),
        f"{median(one.load_cpu_share for one in figures):.1%}",
    ]

"""The summary of a decision log as tables and a histogram for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.bar import Bar
from rich.console import RenderableType
from rich.table import Table

from disagg_router.observability.explain import PathSummary, RatioBin, Summary

_BAR_CHARACTERS = 40


def tables(summary: Summary) -> Iterator[RenderableType]:
    yield _headline(summary)
    yield _table(
        "Decisions",
        ("path", "reason", "requests", "share"),
        [(it.path, it.reason, f"{it.requests:,}", _percent(it.share)) for it in summary.decisions],
    )
    yield _table(
        "TTFT, and measured / predicted",
        ("path", "p50", "p99", "compared", "ratio p50", "p90", "error"),
        [_timing_row(it) for it in summary.paths],
    )
    if any(it.requests for it in summary.ratios):
        yield _histogram(summary.ratios)
    yield _table(
        "Objectives met, where measured",
        ("path", "requests", "ttft", "tpot", "max gap", "good"),
        [_attainment_row(it) for it in summary.paths],
    )
    if summary.rejections:
        yield _table(
            "Rejections",
            ("code", "requests", "early"),
            [(it.code, f"{it.requests:,}", f"{it.early:,}") for it in summary.rejections],
        )
    if summary.worst:
        yield _table(
            "Worst predictions",
            ("path", "predicted", "measured", "ratio", "request"),
            [
                (it.path, _ms(it.predicted_s), _ms(it.measured_s), f"{it.ratio:.2f}", it.request_id)
                for it in summary.worst
            ],
        )


def _headline(summary: Summary) -> str:
    first, last = (datetime.fromtimestamp(at_s, UTC) for at_s in (summary.first_at_s, summary.last_at_s))
    text = f"{summary.requests:,} requests from {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC"
    if summary.unreadable_lines:
        text += f"; {summary.unreadable_lines:,} unreadable line(s) left out"
    if summary.other_arm.decisions:
        text += (
            f"\nanother path was predicted to be faster, by more than its standard deviation, in"
            f" {_percent(summary.other_arm.better)} of {summary.other_arm.decisions:,} decisions"
        )
    return text


def _timing_row(it: PathSummary) -> tuple[str, ...]:
    shown = (it.path, _ms(it.ttft_p50_s), _ms(it.ttft_p99_s))
    if it.accuracy is None:
        return (*shown, "0", "-", "-", "-")
    told = it.accuracy
    return (
        *shown,
        f"{told.requests:,}",
        f"{told.ratio_p50:.2f}",
        f"{told.ratio_p90:.2f}",
        _percent(told.error_p50),
    )


def _attainment_row(it: PathSummary) -> tuple[str, ...]:
    met = it.attainment
    return (it.path, f"{it.requests:,}", *map(_percent, (met.ttft, met.tpot, met.max_gap, met.all)))


def _histogram(ratios: Sequence[RatioBin]) -> Table:
    """From the first bin with a request to the last."""
    filled = [place for place, it in enumerate(ratios) if it.requests]
    most = max(it.requests for it in ratios)
    table = Table("ratio", "requests", "", title="Measured / predicted TTFT", title_justify="left", box=None)
    for it in ratios[filled[0] : filled[-1] + 1]:
        edge = f"<= {it.up_to:g}" if it.up_to is not None else "more"
        table.add_row(edge, f"{it.requests:,}", Bar(most, 0, it.requests, width=_BAR_CHARACTERS))
    return table


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        text = name in ("path", "reason", "code", "request")
        table.add_column(name, justify="left" if text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.0f} ms"

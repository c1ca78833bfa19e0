"""A simulation over time, as a picture; and how a picture is begun and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from disagg_router.errors import ConfigError
from disagg_router.sim.model import Outcome
from disagg_router.sim.report import Timeline
from disagg_router.sim.world import Setup

BINS = 60


def draw(timeline: Timeline, outcomes: Sequence[Outcome], setup: Setup, file: Path) -> None:
    """Attainment, TTFT, KV occupancy, running streams, leans and the links. Raises ConfigError."""
    if not timeline.samples:
        raise ConfigError("the run was too short for a picture: give it more requests")
    figure = new_figure(11, 12)
    axes = figure.subplots(6, 1, sharex=True)
    at_s = [sample.at_s for sample in timeline.samples]
    _attainment(axes[0], outcomes, setup)
    _lines(axes[1], at_s, [sample.kv_usage for sample in timeline.samples], "KV in use")
    _lines(axes[2], at_s, [sample.running for sample in timeline.samples], "running")
    _lines(axes[3], at_s, [sample.leans for sample in timeline.samples if sample.leans], "lean")
    axes[4].plot(at_s, [sample.link_bytes_per_s / 1e9 for sample in timeline.samples])
    axes[4].set_ylabel("KV moved, GB/s")
    axes[5].plot(at_s, [sample.waiting for sample in timeline.samples])
    axes[5].set_ylabel("waiting in the router")
    axes[5].set_xlabel("virtual time, s")
    save(figure, file)


def new_figure(width_inches: float, height_inches: float) -> Any:  # noqa: ANN401 - matplotlib has no types
    """Raises ConfigError."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra: only who wants a picture needs it
    except ImportError as exc:
        raise ConfigError("a picture needs matplotlib: pip install 'disagg-router[picture]'") from exc
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save(figure: Any, file: Path) -> None:  # noqa: ANN401
    """Raises ConfigError."""
    try:
        figure.savefig(file)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{file} cannot be written: {exc}") from exc


def _attainment(axes: Any, outcomes: Sequence[Outcome], setup: Setup) -> None:  # noqa: ANN401 - matplotlib has no types
    at_s = np.array([outcome.at_s for outcome in outcomes])
    good = np.array([outcome.good(setup.slo) for outcome in outcomes], dtype=float)
    edges = np.linspace(0.0, float(at_s.max()) + 1e-9, BINS + 1)
    offered, _ = np.histogram(at_s, edges)
    met, _ = np.histogram(at_s, edges, weights=good)
    some = offered > 0
    axes.plot(((edges[1:] + edges[:-1]) / 2)[some], met[some] / offered[some])
    axes.set_ylim(-0.05, 1.05)
    axes.set_ylabel("attainment by arrival")


def _lines(axes: Any, at_s: Sequence[float], rows: Sequence[Sequence[float]], label: str) -> None:  # noqa: ANN401
    if rows:
        axes.plot(at_s[-len(rows) :], rows, linewidth=0.8)
    axes.set_ylabel(label)

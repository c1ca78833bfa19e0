"""The grid's simulations: each is run once, in a process of its own, and kept as a line of a file."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from disagg_router.errors import ConfigError
from disagg_router.model import Role
from disagg_router.policies.registry import build_policy
from disagg_router.sim.drive import simulate
from disagg_router.sim.grid_cells import MAX_PROMPT_TOKENS, THRESHOLD_TOKENS, Cell, Contender, Traffic
from disagg_router.sim.model import End, FleetPlan, Outcome, Workload
from disagg_router.sim.profiles import load_profile
from disagg_router.sim.report import window_s
from disagg_router.sim.workloads import Cut, Pace, load
from disagg_router.sim.world import Setup


@dataclass(frozen=True, slots=True)
class Spec:
    """One simulation. `skip_rows` of the trace come before its requests; `seed` is of arrivals, noise and ties."""

    cell: Cell
    contender: Contender
    rate_rps: float
    requests: int
    skip_rows: int
    seed: int
    admission: bool = True

    @property
    def key(self) -> str:
        """All that it depends on, but the code."""
        admission = "on" if self.admission else "off"
        return (
            f"{self.cell.name} | {self.contender.name} | {self.rate_rps:.6g}/s {self.requests}+{self.skip_rows} "
            f"seed {self.seed} admission {admission}"
        )


@dataclass(frozen=True, slots=True)
class Result:
    """`good`: one 0 or 1 per request, in the order in which they came. `span_s`: the time that they stand for."""

    good: str
    span_s: float
    refused: int
    failed: int
    paths: Mapping[str, int]
    wall_s: float

    @property
    def attainment(self) -> float:
        return self.good.count("1") / len(self.good)


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """Of the rows that are not too long."""

    rows: int
    mean_output_tokens: float


def run_one(spec: Spec, traces: Path) -> Result:
    """Raises ConfigError."""
    began_s = time.monotonic()
    hardware, contender = spec.cell.hardware, spec.contender
    plan = FleetPlan(contender.pools, contender.chunk_tokens, spec.cell.link_gbyte_per_s * 1e9)
    setup = Setup(
        plan, dict.fromkeys(Role, load_profile(hardware.profile)), spec.cell.slo, spec.admission, seed=spec.seed
    )
    options = {"tokens": THRESHOLD_TOKENS} if contender.policy == "threshold" else {}
    run = simulate(setup, workload_of(spec, traces), build_policy(contender.policy, options))
    return _result(run.outcomes, setup, time.monotonic() - began_s)


def workload_of(spec: Spec, traces: Path) -> Workload:
    """The same for all contenders of a cell, rate and seed."""
    cut = Cut(spec.requests, spec.skip_rows, MAX_PROMPT_TOKENS)
    traffic = spec.cell.traffic
    found = load(
        traces / traffic.file, traffic.format_name, random.Random(spec.seed), cut=cut, pace=Pace(spec.rate_rps)
    )
    return found.workload


def figures_of(traffic: Traffic, traces: Path) -> TraceFigures:
    """Raises ConfigError."""
    cut = Cut(max_prompt_tokens=MAX_PROMPT_TOKENS)
    found = load(traces / traffic.file, traffic.format_name, random.Random(0), cut=cut, pace=Pace(1.0))
    arrivals = found.workload.arrivals
    return TraceFigures(len(arrivals), fmean(arrival.output_tokens for arrival in arrivals))


def _result(outcomes: Sequence[Outcome], setup: Setup, wall_s: float) -> Result:
    ends = Counter(outcome.end for outcome in outcomes)
    paths = Counter(outcome.path.value for outcome in outcomes if outcome.end is End.DONE and outcome.path is not None)
    good = "".join("1" if outcome.good(setup.slo) else "0" for outcome in outcomes)
    return Result(good, window_s(outcomes), ends[End.REFUSED], ends[End.FAILED], dict(paths), round(wall_s, 3))


class Runs:
    """Runs what the file has no line of, `jobs` at a time. Use as a context manager.

    `forget`: what is in the file of this policy counts for nothing, so that a change of the policy can be judged
    without the baselines being run again.
    """

    def __init__(
        self, file: Path, traces: Path, jobs: int, done: Callable[[], None], forget: str | None = None
    ) -> None:
        self._file, self._traces, self._done = file, traces, done
        self._known = _read(file, forget)
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_end_with_parent)
        self.fresh = 0
        file.parent.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    async def all(self, specs: Iterable[Spec]) -> list[Result]:
        """In the order asked for."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.one(spec)) for spec in specs]
        return [task.result() for task in tasks]

    async def one(self, spec: Spec) -> Result:
        known = self._known.get(spec.key)
        if known is None:
            loop = asyncio.get_running_loop()
            known = await loop.run_in_executor(self._pool, run_one, spec, self._traces)
            self._known[spec.key] = known
            self.fresh += 1
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(_as_line(spec, known)) + "\n")
        self._done()
        return known


def _end_with_parent() -> None:
    """A pool's processes wait for work for ever when who gives it was killed; Ctrl-C ends them without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _as_line(spec: Spec, result: Result) -> dict[str, Any]:
    bits = result.good
    return {
        "simulation": spec.key,
        "policy": spec.contender.policy,
        "attainment": round(result.attainment, 4),
        "requests": len(bits),
        "good": f"{int(bits, 2):x}",
        "span_s": result.span_s,
        "refused": result.refused,
        "failed": result.failed,
        "paths": dict(result.paths),
        "wall_s": result.wall_s,
    }


def _read(file: Path, forget: str | None) -> dict[str, Result]:
    """A last line that was cut off is as good as none. Raises ConfigError."""
    found: dict[str, Result] = {}
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            file.write_text("".join(lines[:-1]), encoding="utf-8")
            break
        try:
            said = json.loads(line)
            good = f"{int(said['good'], 16):0{said['requests']}b}"
            result = Result(good, said["span_s"], said["refused"], said["failed"], said["paths"], said["wall_s"])
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(
                f"{file}, line {number} is not of a grid: give another --out, or delete the line"
            ) from exc
        if said["policy"] != forget:
            found[said["simulation"]] = result
    return found

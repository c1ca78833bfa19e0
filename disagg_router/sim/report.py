"""What a simulation found, as figures."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from disagg_router.model import Slo
from disagg_router.sim.drive import Run
from disagg_router.sim.model import End, Outcome
from disagg_router.sim.world import Setup, World

SAMPLES = 240  # over the whole run


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one moment. `kv_usage`, `running` and `leans` have one entry per instance, in the fleet's order;
    `link_bytes_per_s` is of all of them together since the last sample."""

    at_s: float
    waiting: int  # in the router's queue
    kv_usage: tuple[float, ...]
    running: tuple[int, ...]
    leans: tuple[float, ...]
    link_bytes_per_s: float


@dataclass(slots=True)
class Timeline:
    """Samples for a picture; give `watch` to `simulate`."""

    span_s: float
    samples: list[Sample] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def watch(self, world: World) -> None:
        self._tasks.append(asyncio.create_task(self._keep_sampling(world)))

    async def _keep_sampling(self, world: World) -> None:
        every_s = max(0.25, self.span_s / SAMPLES)
        moved_bytes = 0.0
        while True:
            await asyncio.sleep(every_s)
            loads = [engine.load() for engine in world.engines.values()]
            leans = world.parts.views.leans.lean
            pulled_bytes = sum(load.pulled_bytes for load in loads)
            self.samples.append(
                Sample(
                    at_s=world.loop.time(),
                    waiting=world.parts.queue.waiting,
                    kv_usage=tuple(load.kv_usage for load in loads),
                    running=tuple(load.running for load in loads),
                    leans=tuple(leans.values()),
                    link_bytes_per_s=(pulled_bytes - moved_bytes) / every_s,
                )
            )
            moved_bytes = pulled_bytes


def window_s(outcomes: Sequence[Outcome]) -> float:
    """What N arrivals stand for at their mean rate: N / (N - 1) of the time between the first and the last."""
    if len(outcomes) < 2:
        return 0.0
    times = [outcome.at_s for outcome in outcomes]
    return (max(times) - min(times)) * len(outcomes) / (len(outcomes) - 1)


def attainment(outcomes: Sequence[Outcome], slo: Slo) -> float:
    """Good requests over offered ones, refused and failed ones included."""
    return sum(outcome.good(slo) for outcome in outcomes) / len(outcomes)


def figures(run: Run, setup: Setup) -> dict[str, Any]:
    """The contract of `simulate --json` (design.md section 6)."""
    outcomes, slo = run.outcomes, setup.slo
    done = [outcome for outcome in outcomes if outcome.end is End.DONE]
    span_s, share = window_s(outcomes), attainment(outcomes, slo) if outcomes else 0.0
    offered_rps = len(outcomes) / span_s if span_s else 0.0
    gpus = sum(count * setup.profiles[role].gpus for role, count in setup.plan.pools.items())
    loads = [engine.load() for engine in run.world.engines.values()]
    ends = Counter(outcome.end for outcome in outcomes)
    return {
        "goodput_rps": share * offered_rps,
        "goodput_rps_per_gpu": share * offered_rps / gpus,
        "attainment": share,
        "offered_rps": offered_rps,
        "requests": {end.value: ends[end] for end in End},
        "ttft_s": _quantiles([outcome.ttft_s for outcome in done]),
        "tpot_s": _quantiles([outcome.tpot_s for outcome in done if outcome.output_tokens > 1]),
        "max_gap_s": _quantiles([outcome.max_gap_s for outcome in done]),
        "queue_wait_s": _quantiles([outcome.queued_s for outcome in outcomes]),
        "output_tokens_per_s": sum(outcome.output_tokens for outcome in done) / span_s if span_s else 0.0,
        "paths": dict(Counter(outcome.path.value for outcome in done if outcome.path is not None)),
        "decisions": dict(run.world.seen.decisions),
        "kv_bytes_moved": sum(load.pulled_bytes for load in loads),
        "gpus": gpus,
        "simulated_s": run.end_s,
    }


def _quantiles(values: Sequence[float]) -> Mapping[str, float]:
    """By nearest rank; 0 of nothing."""
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    p50, p99 = np.quantile(values, [0.5, 0.99], method="inverted_cdf")
    return {"mean": float(np.mean(values)), "p50": float(p50), "p99": float(p99)}

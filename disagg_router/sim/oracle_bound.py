"""What nobody can beat, knowing everything beforehand: how many of a workload's requests could be good at all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disagg_router.model import Slo
from disagg_router.sim.describe import leading
from disagg_router.sim.model import Arrival, Workload
from disagg_router.sim.profiles import Profile
from disagg_router.sim.world import Setup

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BESIDE = (0, 64)  # streams: a chunk costs least among others where what it shares with them is most


@dataclass(frozen=True, slots=True)
class Hindsight:
    """Shares of all requests. `idle`: those whose objectives an idle instance meets, with all of their prompt cached
    that anybody ever sent before. `capacity`: as many of these as the fleet has time for, the cheapest first, each at
    the least that it can cost."""

    idle: float
    capacity: float

    @property
    def attainment(self) -> float:
        return min(self.idle, self.capacity)


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of one request: instance seconds, and how long it may take once it has arrived."""

    prefill_s: float
    decode_s: float
    stays_s: float


def hindsight(setup: Setup, workload: Workload) -> Hindsight:
    """Noise left out. Of at least one arrival."""
    arrivals, slo = workload.arrivals, setup.slo
    profiles = [setup.profiles[role] for role in setup.plan.pools]
    costs = [
        _cost(arrival, cached_tokens, profiles, slo, setup.plan.chunk_tokens)
        for arrival, cached_tokens in zip(arrivals, _cached_tokens(workload), strict=True)
        if _idle_is_good(arrival, cached_tokens, profiles, slo, setup.plan.chunk_tokens)
    ]
    span_s = arrivals[-1].at_s - arrivals[0].at_s
    stays_s = max((cost.stays_s for cost in costs), default=0.0)
    served = min(
        _fitting([cost.prefill_s for cost in costs], setup.plan.instances * (span_s + slo.ttft_s)),
        _fitting([cost.prefill_s + cost.decode_s for cost in costs], setup.plan.instances * (span_s + stays_s)),
    )
    return Hindsight(len(costs) / len(arrivals), served / len(arrivals))


def _fitting(works_s: Sequence[float], time_s: float) -> int:
    """The most that can be done in that time."""
    return sum(done_s <= time_s for done_s in itertools.accumulate(sorted(works_s)))


def _cached_tokens(workload: Workload) -> Iterator[int]:
    """Of each prompt, what a cache without limit holds when it comes."""
    size, held = workload.block_tokens, set[int]()
    for arrival in workload.arrivals:
        usable = arrival.blocks[: (arrival.prompt_tokens - 1) // size]
        yield size * leading(usable, held)
        held.update(arrival.blocks[: (arrival.prompt_tokens + arrival.output_tokens) // size])


def _idle_is_good(
    arrival: Arrival, cached_tokens: int, profiles: Sequence[Profile], slo: Slo, chunk_tokens: int | None
) -> bool:
    fitting = [p for p in profiles if arrival.prompt_tokens + arrival.output_tokens <= p.kv_capacity_tokens]
    if not fitting:
        return False
    chunks = list(_chunks(arrival.prompt_tokens, cached_tokens, chunk_tokens))
    ttft_s = min(sum(profile.timings.step_s([chunk], 0, 0) for chunk in chunks) for profile in fitting)
    step_s = min(profile.timings.step_s((), 1, arrival.prompt_tokens) for profile in fitting)
    return ttft_s <= slo.ttft_s and (arrival.output_tokens < 2 or step_s <= min(slo.tpot_s, slo.max_gap_s))


def _cost(
    arrival: Arrival, cached_tokens: int, profiles: Sequence[Profile], slo: Slo, chunk_tokens: int | None
) -> _Cost:
    steps, context_tokens = arrival.output_tokens - 1, arrival.prompt_tokens + arrival.output_tokens / 2
    chunks = list(_chunks(arrival.prompt_tokens, cached_tokens, chunk_tokens))
    prefill_s = min(sum(_chunk_s(profile, chunk) for chunk in chunks) for profile in profiles)
    step_s = min(
        profile.timings.step_s((), streams, streams * context_tokens) / streams
        for profile in profiles
        for streams in BATCHES
    )
    return _Cost(prefill_s, steps * step_s, slo.ttft_s + steps * slo.tpot_s)


def _chunk_s(profile: Profile, chunk: tuple[int, int]) -> float:
    """What a chunk adds to a step that is made anyway."""
    step_s = profile.timings.step_s
    return min(step_s([chunk], streams, 0) - step_s((), streams, 0) for streams in BESIDE)


def _chunks(prompt_tokens: int, cached_tokens: int, chunk_tokens: int | None) -> Iterator[tuple[int, int]]:
    """New tokens, and those before them."""
    for before in range(cached_tokens, prompt_tokens, chunk_tokens or prompt_tokens):
        yield min(chunk_tokens or prompt_tokens, prompt_tokens - before), before

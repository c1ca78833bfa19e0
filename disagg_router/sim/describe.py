"""What a workload asks for, in figures."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from disagg_router.sim.model import Workload


@dataclass(frozen=True, slots=True)
class Spread:
    p50: float
    p90: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class Description:
    """`rate_rps`: intervals over the time between the first arrival and the last. `shared_fraction`: of all prompt
    tokens those that a cache without limit would have."""

    requests: int
    span_s: float
    rate_rps: float
    prompt_tokens: Spread
    output_tokens: Spread
    shared_fraction: float


def describe(workload: Workload) -> Description:
    """Of at least one arrival."""
    arrivals = workload.arrivals
    span_s = arrivals[-1].at_s - arrivals[0].at_s
    return Description(
        requests=len(arrivals),
        span_s=span_s,
        rate_rps=(len(arrivals) - 1) / span_s if span_s else 0.0,
        prompt_tokens=spread([arrival.prompt_tokens for arrival in arrivals]),
        output_tokens=spread([arrival.output_tokens for arrival in arrivals]),
        shared_fraction=lru_hit_rate(workload, math.inf),
    )


def lru_hit_rate(workload: Workload, capacity_tokens: float) -> float:
    """Of all prompt tokens, those found in one cache of full prompt blocks that serves the requests one by one.

    Answers are not kept. Of one prompt the last blocks are the first to go, as in vLLM: without them the others still
    are a prefix.
    """
    size = workload.block_tokens
    held: OrderedDict[int, None] = OrderedDict()
    found_tokens = 0
    for arrival in workload.arrivals:
        prompt = arrival.blocks[: arrival.prompt_tokens // size]
        found_tokens += size * leading(prompt, held)
        for block in reversed(prompt):
            held[block] = None
            held.move_to_end(block)
        while len(held) * size > capacity_tokens:
            held.popitem(last=False)
    return found_tokens / sum(arrival.prompt_tokens for arrival in workload.arrivals)


def leading(blocks: Sequence[int], held: Container[int]) -> int:
    """How many of these are held, from the first one on."""
    return next((i for i, block in enumerate(blocks) if block not in held), len(blocks))


def spread(values: Sequence[float]) -> Spread:
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
    return Spread(float(p50), float(p90), float(p99), float(np.mean(values)))

"""One cell of the grid: the right rates, the baselines that matter there, and the final comparison.

Everything is asked of `Runs`, which remembers: a search that is begun again ends where it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagg_router.sim.grid_cells import Cell, Contender, baselines, reference, subject
from disagg_router.sim.grid_runs import Result, Runs, Spec, TraceFigures

KEPT = 0.9  # of the attainment at near-zero load, by the best baseline at rate 1.0
RATES = (0.8, 1.0, 1.2)
NEAR_ZERO_RPS = 0.05  # of each instance
RACED_AGAIN = 1.3  # a winner that carries so many times the load it was raced at is raced again at its own
QUEUES = 5  # a fleet settles within a mean answer, or a queue so many times as long as a request may wait
SEARCH_SEED = 0


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated. Where a rate is high, more requests than these: `search_settles` or `final_settles` times
    what arrives while a fleet settles. Fewer would end before it has as many streams, or as long a queue, as the rate
    stands for, and show rates that it cannot hold.

    `race_requests`: of each round; the better third goes on. `every_split`: of the instances into two roles.
    """

    near_zero_requests: int
    search_requests: int
    bisections: int
    race_requests: tuple[int, ...]
    finalists: int
    final_requests: int
    seeds: int
    search_settles: float
    final_settles: float
    every_split: bool


FULL = Effort(200, 600, 4, (200, 600), 3, 3000, 3, 2.5, 4.0, every_split=True)
QUICK = Effort(100, 200, 3, (150, 300), 2, 500, 2, 1.5, 1.5, every_split=False)


@dataclass(frozen=True, slots=True)
class CellRuns:
    """`races`: attainment of each baseline in the last round that it was in, over the winner's of that round, with and
    without admission. `finals`: by rate factor, admission and contender, one result per seed."""

    cell: Cell
    near_zero_attainment: float
    knee_rps: float
    races: Mapping[bool, Mapping[Contender, float]]
    finals: Mapping[tuple[float, bool, Contender], Sequence[Result]]


class Search:
    """Of one cell. `trace`: its traffic's."""

    def __init__(self, cell: Cell, runs: Runs, effort: Effort, trace: TraceFigures) -> None:
        self._cell, self._runs, self._effort, self._rows = cell, runs, effort, trace.rows
        answer_s = trace.mean_output_tokens * (cell.slo.tpot_s or 0.0)
        self._settle_s = max(answer_s, QUEUES * cell.slo.ttft_s)

    async def run(self) -> CellRuns:
        guess_rps = await self._knee_rps(reference(self._cell), self._cell.hardware.guess_rps)
        scores = await self._race(guess_rps, admission=True)
        knee_rps = await self._knee_rps(next(iter(scores)), guess_rps)
        if knee_rps > RACED_AGAIN * guess_rps:
            scores = await self._race(knee_rps, admission=True)
            knee_rps = max(knee_rps, await self._knee_rps(next(iter(scores)), knee_rps))
        unguarded = await self._race(knee_rps, admission=False)
        near_zero = await self._near_zero(next(iter(scores)))
        finals: dict[tuple[float, bool, Contender], Sequence[Result]] = {}
        count = self._effort.finalists
        for contender in (subject(self._cell), *list(scores)[:count]):
            finals |= await self.final(contender, knee_rps, admission=True)
        for contender in list(unguarded)[:count]:
            finals |= await self.final(contender, knee_rps, admission=False)
        return CellRuns(self._cell, near_zero, knee_rps, {True: scores, False: unguarded}, finals)

    async def final(
        self, contender: Contender, knee_rps: float, *, admission: bool
    ) -> dict[tuple[float, bool, Contender], Sequence[Result]]:
        """At every rate; the seeds have different parts of the trace, the same for every contender."""
        seeds = range(1, self._effort.seeds + 1)
        specs = [
            self._final_spec(contender, rounded(factor * knee_rps), seed, admission=admission)
            for factor in RATES
            for seed in seeds
        ]
        found = await self._runs.all(specs)
        return {
            (factor, admission, contender): found[i * len(seeds) : (i + 1) * len(seeds)]
            for i, factor in enumerate(RATES)
        }

    def _final_spec(self, contender: Contender, rate_rps: float, seed: int, *, admission: bool) -> Spec:
        requests = self._requests(self._effort.final_requests, rate_rps, self._effort.final_settles)
        skip_rows = (self._rows - requests) * (seed - 1) // max(1, self._effort.seeds - 1)
        return Spec(self._cell, contender, rate_rps, requests, skip_rows, seed, admission)

    def _requests(self, least: int, rate_rps: float, settles: float) -> int:
        return min(self._rows, max(least, math.ceil(rate_rps * self._settle_s * settles)))

    async def _near_zero(self, contender: Contender) -> float:
        rate_rps = NEAR_ZERO_RPS * self._cell.hardware.instances
        spec = Spec(self._cell, contender, rate_rps, self._effort.near_zero_requests, 0, SEARCH_SEED)
        return (await self._runs.one(spec)).attainment

    async def _knee_rps(self, contender: Contender, guess_rps: float) -> float:
        """The highest rate that keeps KEPT: doubled or halved until one does and another does not, then bisected."""
        least = KEPT * await self._near_zero(contender)
        low, high = 0.0, math.inf
        rate_rps = rounded(guess_rps)
        while not low or high == math.inf:
            if await self._attainment(contender, rate_rps) >= least:
                low, rate_rps = rate_rps, rounded(rate_rps * 2)
            else:
                high, rate_rps = rate_rps, rounded(rate_rps / 2)
                if rate_rps <= NEAR_ZERO_RPS:
                    return rate_rps
        for _ in range(self._effort.bisections):
            middle = rounded(math.sqrt(low * high))
            if await self._attainment(contender, middle) >= least:
                low = middle
            else:
                high = middle
        return low

    async def _attainment(self, contender: Contender, rate_rps: float) -> float:
        requests = self._requests(self._effort.search_requests, rate_rps, self._effort.search_settles)
        result = await self._runs.one(Spec(self._cell, contender, rate_rps, requests, 0, SEARCH_SEED))
        return result.attainment

    async def _race(self, rate_rps: float, *, admission: bool) -> dict[Contender, float]:
        """Successive halving, by thirds: who is clearly worse is not looked at for longer."""
        scores: dict[Contender, float] = {}
        able = baselines(self._cell, every_split=self._effort.every_split)
        for least in self._effort.race_requests:
            requests = self._requests(least, rate_rps, self._effort.search_settles)
            specs = [Spec(self._cell, one, rate_rps, requests, 0, SEARCH_SEED, admission) for one in able]
            found = dict(zip(able, await self._runs.all(specs), strict=True))
            most = max(result.attainment for result in found.values()) or 1.0
            scores |= {one: result.attainment / most for one, result in found.items()}
            able = sorted(able, key=lambda one: -found[one].attainment)
            able = able[: max(2 * self._effort.finalists, len(able) // 3)]
        # who was dropped early may have a score that is as good as that of the last round
        ranked = [*able, *sorted((one for one in scores if one not in able), key=lambda one: -scores[one])]
        return {one: scores[one] for one in ranked}


def rounded(rate_rps: float) -> float:
    """To three digits, so that a rate can be written down and found again."""
    return float(f"{rate_rps:.3g}")

"""How much better other decisions would have been: some of a run's decisions, each tried with its alternatives.

The state is the whole process, and forking clones it: each copy takes its own decision and goes on with the same
policy, the same arrivals and the same luck for a while, and says how many requests met their objectives. The run itself
goes on as if nobody had asked.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from disagg_router.interfaces import PathPolicy
from disagg_router.model import Decision, InferenceRequest, Slo
from disagg_router.sim.drive import Run, simulate
from disagg_router.sim.jobs import Job, Standing
from disagg_router.sim.model import Arrival, End, Workload
from disagg_router.sim.oracle_branches import alternatives
from disagg_router.sim.oracle_fork import Copy, split
from disagg_router.sim.world import Setup, World
from disagg_router.view import ClusterView

LIKELY = 0.99  # of the requests are done in half the time for which a branch is followed;
ENOUGH_DONE = 20  # to know how long that is
# Of a request, what else could be decided than what was, at most so many.
Others = Callable[[InferenceRequest, ClusterView, Decision, int], Sequence[Decision]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """`decisions` of a run, spread evenly over its arrivals, each with at most so many `branches`, the one taken among
    them, and each of these with so many `lucks`: the run's own, and others with other noise. `horizon_s` is the longest
    that one is followed, `limit_s` after how much real time it is given up."""

    decisions: int = 100
    branches: int = 4
    lucks: int = 1
    horizon_s: float = 20.0
    at_once: int = 2
    limit_s: float = 60.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Tried:
    """One decision; the first branch is the one that was taken. `good[branch][luck]`: so many of the `counted` requests
    met their objectives."""

    number: int
    at_s: float
    horizon_s: float
    uncached_tokens: int  # where the prompt was computed
    branches: Sequence[Decision]
    good: Sequence[Sequence[int]]
    counted: int


def simulate_with_branches(
    setup: Setup,
    workload: Workload,
    policy: PathPolicy,
    sampling: Sampling,
    *,
    watch: Callable[[World], None] = lambda _: None,
    progress: Callable[[int], None] = lambda _: None,
    others: Others = alternatives,
) -> tuple[Run, Sequence[Tried]]:
    """The same run as without. No thread may run beside it: a copy would wait for its locks. A decision of which a
    branch came to nothing is left out."""
    oracle = _Oracle(policy, workload, setup.slo, sampling, progress, others)

    def watched(world: World) -> None:
        oracle.world = world
        watch(world)

    try:
        run = simulate(setup, workload, oracle, watch=watched, progress=oracle.progress)
    finally:
        oracle.copy_must_have_answered()
    return run, oracle.tried


def sampled(arrivals: int, decisions: int, rng: random.Random) -> frozenset[int]:
    """One out of each of so many equal parts."""
    if arrivals <= decisions:
        return frozenset(range(arrivals))
    edges = [arrivals * part // decisions for part in range(decisions + 1)]
    return frozenset(rng.randrange(low, high) for low, high in itertools.pairwise(edges))


class _Oracle:
    """The policy, and at the sampled decisions a crossroads."""

    def __init__(
        self,
        policy: PathPolicy,
        workload: Workload,
        slo: Slo,
        sampling: Sampling,
        progress: Callable[[int], None],
        others: Others,
    ) -> None:
        self._policy, self._workload, self._slo, self._sampling = policy, workload, slo, sampling
        self.needs_token_count, self.soft_roles = policy.needs_token_count, policy.soft_roles
        self._told, self._others = progress, others
        rng = random.Random(sampling.seed)
        self._left = set(sampled(len(workload.arrivals), sampling.decisions, rng))
        self.world: World | None = None
        self.tried: list[Tried] = []
        self._copy: _Follower | None = None

    def decide(self, request: InferenceRequest, view: ClusterView) -> Decision:
        taken = self._policy.decide(request, view)
        number = int(request.id)
        if self._copy is not None or number not in self._left:
            return taken
        self._left.remove(number)
        others = self._others(request, view, taken, self._sampling.branches - 1)
        return self._cross(request, number, (taken, *others))

    def progress(self, ended: int) -> None:
        if self._copy is None:
            self._told(ended)
        elif ended == len(self._workload.arrivals):
            self._copy.answer()

    def copy_must_have_answered(self) -> None:
        if self._copy is not None:
            self._copy.copy.give_up()

    def _cross(self, request: InferenceRequest, number: int, branches: Sequence[Decision]) -> Decision:
        """In each copy another branch; here, once all is known of them, the one taken."""
        assert self.world is not None
        world, sampling = self.world, self._sampling
        at_s, lucks = world.loop.time(), sampling.lucks
        horizon_s = min(sampling.horizon_s, 2 * completion_s(world.standing))
        alone = len(branches) == 1  # then it is not worth a copy
        found = split(0 if alone else len(branches) * lucks, at_once=sampling.at_once, limit_s=sampling.limit_s)
        if isinstance(found, Copy):
            branch, luck = divmod(found.number, lucks)
            self._copy = _Follower(found, world, self._workload.arrivals, self._slo, at_s + horizon_s)
            self._copy.begin(f"{sampling.seed} {number} {luck}" if luck else None)
            return branches[branch]
        if all(found):
            counts = [_Counts(0, 0)] * lucks if alone else [_Counts(*json.loads(answer)) for answer in found]
            good = [[one.good for one in counts[i : i + lucks]] for i in range(0, len(counts), lucks)]
            uncached_tokens = request.uncached_tokens(branches[0].prefiller)
            self.tried.append(Tried(number, at_s, horizon_s, uncached_tokens, branches, good, counts[0].counted))
        return branches[0]


class _Counts(NamedTuple):
    """Of requests that were underway at the decision or came soon after."""

    good: int
    counted: int


class _Follower:
    """In a copy: lets the run go on up to its horizon, counts and is gone."""

    def __init__(self, copy: Copy, world: World, arrivals: Sequence[Arrival], slo: Slo, end_s: float) -> None:
        self.copy, self._world, self._arrivals, self._slo, self._end_s = copy, world, arrivals, slo, end_s
        self._ended = len(world.standing.outcomes)  # before the decision
        # Of those that come later nobody would know whether their first token is in time.
        self._last_s = max(world.loop.time(), end_s - slo.ttft_s)

    def begin(self, luck: str | None) -> None:
        """With other noise for a `luck`."""
        gc.disable()  # it would touch, and so copy, all the memory that is shared with the original
        asyncio._set_running_loop(self._world.loop)  # asyncio knows of forks, and that a loop rarely outlives one
        if luck is not None:
            for i, die in enumerate(self._world.dice):
                die.seed(f"{luck} {i}")
        self._world.loop.call_at(self._end_s, self.answer)

    def answer(self) -> None:
        try:
            said = json.dumps(self._counts()).encode()
        except BaseException:
            self.copy.give_up()
        self.copy.answer(said)

    def _counts(self) -> _Counts:
        standing, now_s = self._world.standing, self._world.loop.time()
        for engine in self._world.engines.values():
            engine.catch_up()
        ended = [one for one in standing.outcomes[self._ended :] if one.at_s <= self._last_s]
        underway = [
            good_so_far(job, self._arrivals[number], self._slo, now_s)
            for number, job in standing.underway.items()
            if self._arrivals[number].at_s <= self._last_s
        ]
        good = sum(one.good(self._slo) for one in ended) + sum(underway)
        return _Counts(good, len(ended) + len(underway))


def completion_s(standing: Standing) -> float:
    """What nearly all requests were done in so far; infinite as long as too few are."""
    times_s = [one.done_s - one.at_s for one in standing.outcomes if one.end is End.DONE]
    return float(np.quantile(times_s, LIKELY)) if len(times_s) >= ENOUGH_DONE else float("inf")


def good_so_far(job: Job | None, arrival: Arrival, slo: Slo, now_s: float) -> bool:
    """Whether it has missed none of its objectives yet; its pace is judged as if it ended now."""
    if job is None:
        return now_s - arrival.at_s <= slo.ttft_s
    if job.first_s - arrival.at_s > slo.ttft_s or max(job.max_gap_s, now_s - job.last_s) > slo.max_gap_s:
        return False
    return job.tokens < 2 or (job.last_s - job.first_s) / (job.tokens - 1) <= slo.tpot_s

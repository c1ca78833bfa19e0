"""Whole runs: the router's own code in front of simulated engines with round figures."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from disagg_router.model import Path, Role, Slo, Target
from disagg_router.policies.registry import build_policy
from disagg_router.sim.drive import Run, simulate
from disagg_router.sim.model import Arrival, End, FleetPlan, Outcome, Workload, instance_ids
from disagg_router.sim.profiles import Profile
from disagg_router.sim.report import attainment, figures, window_s
from disagg_router.sim.timings import LinearTimings
from disagg_router.sim.workloads import Lengths, synthetic
from disagg_router.sim.world import Setup, World
from disagg_router.timing import TargetTiming
from tests.sim.engines import content, holds_nothing

SLO = Slo(ttft_s=2.0, tpot_s=0.05, max_gap_s=0.5)
SPLIT = {Role.PREFILL: 1, Role.DECODE: 1}
# 10 ms and 0.1 ms per prompt token; 9 ms and 1 ms per stream.
PREFILL, STEP = (0.01, 1e-4, 0.0), (0.009, 1e-3, 0.0)
KV_BYTES_PER_TOKEN = 1e5


def profile(kv_tokens: int = 200_000, handoff_s: float = 0.02, noise_sd: float = 0.0) -> Profile:
    timings, prior = LinearTimings(PREFILL, STEP), TargetTiming(*PREFILL, *STEP)
    return Profile("round", timings, kv_tokens, KV_BYTES_PER_TOKEN, 1, handoff_s, noise_sd, prior)


def setup(
    pools: dict[Role, int],
    one: Profile | None = None,
    *,
    slo: Slo = SLO,
    admission: bool = True,
    prior_factor: float = 2.0,
    chunk_tokens: int | None = 2048,
    gbyte_per_s: float = 1.0,
    seed: int = 1,
) -> Setup:
    plan = FleetPlan(pools, chunk_tokens, gbyte_per_s * 1e9)
    profiles = dict.fromkeys(Role, one or profile())
    return Setup(plan, profiles, slo, admission=admission, prior_factor=prior_factor, seed=seed)


def made_up(requests: int, rate_rps: float, prompt: int = 1000, output: int = 50, *, seed: int = 1) -> Workload:
    return synthetic(Lengths(prompt, output, sigma=0.8), requests, rate_rps, random.Random(seed))


def asked(*arrivals: tuple[float, int, int]) -> Workload:
    """(at_s, prompt, output), sharing nothing, in blocks of 100."""
    return Workload(
        "by hand",
        100,
        [
            Arrival(number, at_s, prompt, output, range(number * 1000, number * 1000 + (prompt + output) // 100 + 1))
            for number, (at_s, prompt, output) in enumerate(arrivals)
        ],
    )


def served(given: Setup, workload: Workload, policy: str = "break_even", **options: object) -> Run:
    return simulate(given, workload, build_policy(policy, options))


def settled(run: Run, workload: Workload) -> None:
    """Every request has one outcome, and nobody holds anything any more."""
    assert [one.number for one in run.outcomes] == [one.number for one in workload.arrivals]
    assert not run.world.parts.loads.leases.held()
    assert run.world.parts.queue.waiting == 0
    assert all(holds_nothing(engine) for engine in run.world.engines.values())
    assert not run.world.seen.failures
    assert all(one.end is not End.FAILED for one in run.outcomes)


def test_one_request_by_hand():
    """Computed where it is answered: 10 + 100 ms, then four steps of 10 ms."""
    workload = asked((1.0, 1000, 5))
    run = served(setup({Role.UNIFIED: 1}), workload, "always_local")
    settled(run, workload)
    [one] = run.outcomes
    assert (one.end, one.path, one.queued_s) == (End.DONE, Path.LOCAL, 0.0)
    assert [one.ttft_s, one.tpot_s, one.max_gap_s, one.done_s] == pytest.approx([0.11, 0.01, 0.01, 1.15])
    assert run.world.engines[instance_ids(setup({Role.UNIFIED: 1}).plan)[0][0]].load().pulled_bytes == 0


def test_one_handoff_by_hand():
    """110 ms of prefill, 20 ms of handoff, 0.1 s for 100 MB, 10.1 ms for its last token, and four steps."""
    workload = asked((1.0, 1000, 5))
    run = served(setup(SPLIT), workload, "always_remote")
    settled(run, workload)
    [one] = run.outcomes
    assert (one.end, one.path) == (End.DONE, Path.REMOTE_PREFILL)
    assert [one.ttft_s, one.tpot_s] == pytest.approx([0.11 + 0.02 + 0.1 + 0.0101, 0.01])
    found = figures(run, setup(SPLIT))
    assert found["kv_bytes_moved"] == pytest.approx(1000 * KV_BYTES_PER_TOKEN)
    assert found["paths"] == {"remote_prefill": 1}


@pytest.mark.parametrize(
    ("policy", "pools", "admission", "chunk_tokens"),
    [
        ("break_even", {Role.UNIFIED: 3}, True, 2048),
        ("break_even", {Role.UNIFIED: 3}, False, 512),
        ("break_even", {Role.PREFILL: 1, Role.DECODE: 1, Role.UNIFIED: 1}, True, 2048),
        ("always_local", {Role.UNIFIED: 3}, True, None),
        ("always_remote", {Role.PREFILL: 1, Role.DECODE: 2}, True, 2048),
        ("always_remote", {Role.PREFILL: 2, Role.DECODE: 1}, False, 2048),
        ("ttft_min", {Role.UNIFIED: 3}, True, 2048),
    ],
)
def test_outcomes_add_up(policy: str, pools: dict[Role, int], admission: bool, chunk_tokens: int | None):
    """Twice as many as three instances can serve, and too little memory: some are refused, and all leases end."""
    workload = made_up(300, 45.0, seed=3)
    given = setup(pools, profile(kv_tokens=12_800), admission=admission, chunk_tokens=chunk_tokens)
    run = served(given, workload, policy)
    settled(run, workload)
    ends, found = Counter(one.end for one in run.outcomes), figures(run, given)
    assert ends[End.DONE] + ends[End.REFUSED] == 300
    assert (ends[End.REFUSED] > 0) is admission
    assert found["requests"] == {"done": ends[End.DONE], "refused": ends[End.REFUSED], "failed": 0}
    assert sum(found["paths"].values()) == ends[End.DONE]
    assert found["goodput_rps"] == pytest.approx(found["attainment"] * found["offered_rps"])
    assert found["goodput_rps_per_gpu"] == pytest.approx(found["goodput_rps"] / 3)


def test_what_is_refused_holds_nothing():
    """More than an instance has blocks for, some of it at once and some after waiting; what is done was computed."""
    workload = made_up(200, 40.0, prompt=3000, output=100, seed=5)
    run = served(setup({Role.UNIFIED: 1}, profile(kv_tokens=12_800)), workload)
    settled(run, workload)
    refused = [one for one in run.outcomes if one.end is End.REFUSED]
    assert len(refused) > 50
    assert not any(one.good(SLO) for one in refused)
    assert all((one.ttft_s, one.tpot_s, one.done_s) == (0.0, 0.0, 0.0) for one in refused)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_wrong_priors_are_learned(factor: float):
    """400 requests later the policy's prefill times are within 20 % of the engine's, having been off by 2x."""
    lengths = (500, 2000, 6000)
    true_s = [PREFILL[0] + PREFILL[1] * tokens for tokens in lengths]
    given = setup({Role.UNIFIED: 3}, prior_factor=factor, chunk_tokens=8192)
    before: list[float] = []

    def predicted(world: World) -> list[float]:
        now_s = world.loop.time()
        view = world.parts.views.now(now_s)
        target = Target(instance_ids(given.plan)[0][0])
        return [view.costs.prefill_s(target, tokens, 0, 0, 0).mean_s for tokens in lengths]

    run = simulate(
        given,
        made_up(400, 8.0, prompt=2000),
        build_policy("break_even", {}),
        watch=lambda world: before.extend(predicted(world)),
    )
    assert before == pytest.approx([factor * one_s for one_s in true_s])
    assert predicted(run.world) == pytest.approx(true_s, rel=0.2)


def test_what_the_index_says_is_what_is_cached():
    """40 conversations on three instances with too little memory: all that is cached anywhere, and nothing else."""
    rng, at_s = random.Random(2), 0.0
    arrivals: list[Arrival] = []
    for number in range(300):
        at_s += rng.expovariate(4.0)
        talk, turns = rng.randrange(40) * 1000, rng.randrange(1, 25)
        blocks = [*range(talk, talk + turns), *range(50_000 + number * 3, 50_003 + number * 3)]
        arrivals.append(Arrival(number, at_s, turns * 100 + 50, 200, blocks))
    workload = Workload("talks", 100, arrivals)
    run = served(setup({Role.UNIFIED: 3}, profile(kv_tokens=20_000)), workload)
    settled(run, workload)
    index = run.world.parts.index
    assert sum(engine.scheduler.cached_tokens for engine in run.world.engines.values()) > 10_000
    for arrival in arrivals:
        keys = _keys(arrival)
        held = index.cached_tokens(keys, 100)
        for id_, engine in run.world.engines.items():
            told = held[Target(id_)].gpu_tokens if Target(id_) in held else 0
            assert told == 100 * engine.scheduler.cache.cached_blocks(keys)
    assert not any(index.stats().dropped.values())


def _keys(arrival: Arrival) -> list[int]:
    full = (arrival.prompt_tokens + arrival.output_tokens) // 100
    return content(arrival.blocks[:full], 100)


def test_one_seed_gives_one_run():
    """Bit for bit, noise and ties included."""
    given, workload = setup({Role.UNIFIED: 3}, profile(noise_sd=0.1)), made_up(150, 20.0)
    first, again = served(given, workload), served(given, workload)
    assert first.outcomes == again.outcomes
    assert figures(first, given) == figures(again, given)
    other = setup({Role.UNIFIED: 3}, profile(noise_sd=0.1), seed=2)
    assert served(other, workload).outcomes != first.outcomes


@dataclass(frozen=True, slots=True)
class Case:
    ttft_s: float = 2.0
    tpot_s: float = 0.05
    max_gap_s: float = 0.5
    output_tokens: int = 5
    end: End = End.DONE


@pytest.mark.parametrize(
    ("case", "good"),
    [
        (Case(), True),
        (Case(ttft_s=2.001), False),
        (Case(tpot_s=0.051), False),
        (Case(tpot_s=0.051, output_tokens=1), True),
        (Case(max_gap_s=0.501), False),
        (Case(end=End.REFUSED), False),
        (Case(end=End.FAILED), False),
    ],
)
def test_what_is_good(case: Case, good: bool):
    """Every gate holds up to its very value; TPOT is none of a one-token answer."""
    one = Outcome(0, 0.0, case.end, 10, case.output_tokens, case.ttft_s, case.tpot_s, case.max_gap_s)
    assert one.good(SLO) is good


def test_figures_of_an_even_stream():
    """Eleven at one a second stand for eleven seconds; a rate is over those, attainment over all that were offered."""
    outcomes = [Outcome(n, float(n), End.DONE if n else End.REFUSED, 10, 2, 0.1, 0.01, 0.01) for n in range(11)]
    assert window_s(outcomes) == pytest.approx(11.0)
    assert attainment(outcomes, SLO) == pytest.approx(10 / 11)
    assert math.isclose(window_s(outcomes[:1]), 0.0)

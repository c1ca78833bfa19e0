"""When what is asked for changes from long prompts to long answers, the fleet follows, once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from disagg_router.model import Role, Slo
from disagg_router.policies.registry import build_policy
from disagg_router.sim.drive import simulate
from disagg_router.sim.model import FleetPlan, Outcome, Workload
from disagg_router.sim.profiles import load_profiles
from disagg_router.sim.report import Timeline, attainment
from disagg_router.sim.workloads import Lengths, mix_shift, synthetic
from disagg_router.sim.world import Setup

SETUP = Setup(FleetPlan({Role.UNIFIED: 8}), load_profiles("h100-70b-tp4"), Slo(ttft_s=5.0, tpot_s=0.06, max_gap_s=0.25))
# Each at some 70 % of what the fleet can serve of it.
READING, READING_RPS = Lengths(20_000, 200, sigma=0.3), 1.8
WRITING, WRITING_RPS = Lengths(300, 800, sigma=0.3), 45.0
SHIFT_S, RECOVERY_S, WATCHED_S = 120.0, 60.0, 60.0


def made(lengths: Lengths, rate_rps: float, span_s: float, seed: int) -> Workload:
    return synthetic(lengths, round(rate_rps * span_s), rate_rps, random.Random(seed))


def within(outcomes: Sequence[Outcome], from_s: float) -> list[Outcome]:
    """Those that came in the watched time from then on."""
    return [outcome for outcome in outcomes if from_s <= outcome.at_s < from_s + WATCHED_S]


def sign_changes(leans: Sequence[float]) -> int:
    signs = [lean > 0 for lean in leans if lean]
    return sum(one != other for one, other in itertools.pairwise(signs))


@pytest.mark.long
def test_a_fleet_follows_what_is_asked_for(measured):
    """A minute after it, it does as well as if nothing else had ever been asked, and no lean went to and fro."""
    writing = made(WRITING, WRITING_RPS, RECOVERY_S + WATCHED_S, seed=2)
    alone = simulate(SETUP, writing, build_policy("break_even", {})).outcomes
    steady = attainment(within(alone, RECOVERY_S), SETUP.slo)
    both = mix_shift(made(READING, READING_RPS, SHIFT_S, seed=1), writing, SHIFT_S)
    timeline = Timeline(SHIFT_S + RECOVERY_S + WATCHED_S)
    run = simulate(SETUP, both, build_policy("break_even", {}), watch=timeline.watch)
    before = attainment([one for one in run.outcomes if one.at_s < SHIFT_S], SETUP.slo)
    at_once = attainment([one for one in run.outcomes if SHIFT_S <= one.at_s < SHIFT_S + RECOVERY_S], SETUP.slo)
    after = attainment(within(run.outcomes, SHIFT_S + RECOVERY_S), SETUP.slo)
    leans = list(zip(*(sample.leans for sample in timeline.samples if sample.at_s >= SHIFT_S), strict=True))
    most = max(map(sign_changes, leans))
    measured.append(
        f"mix shift: {before:.3f} before, {at_once:.3f} in the minute after it, {after:.3f} then, {steady:.3f} without;"
        f" leans changed sign {most} times at most from then on"
    )
    assert after >= 0.95 * steady
    assert most <= 2

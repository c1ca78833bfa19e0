"""DistServe's worked example: OPT 13B on A100s, 512 tokens in and 64 out, Poisson, an ideal link, nothing refused.

Its authors' figures: 2 prefill and 1 decode GPU serve 3.3 requests per second and GPU at a TTFT of 0.4 s and a TPOT of
0.04 s, one that does both 1.6, which is 2.06 times as much. The range is theirs and 10 % on either side.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from disagg_router.model import Role, Slo
from disagg_router.policies.registry import build_policy
from disagg_router.sim.drive import simulate
from disagg_router.sim.model import FleetPlan
from disagg_router.sim.profiles import load_profiles
from disagg_router.sim.report import attainment
from disagg_router.sim.workloads import Lengths, synthetic
from disagg_router.sim.world import Setup

REQUESTS = 1500
ENOUGH = 0.9
EXACT_RPS = 0.05
GAIN = (1.85, 2.27)

TOGETHER = {Role.UNIFIED: 1}
SPLITS = {
    "1P1D": {Role.PREFILL: 1, Role.DECODE: 1},
    "2P1D": {Role.PREFILL: 2, Role.DECODE: 1},
    "1P2D": {Role.PREFILL: 1, Role.DECODE: 2},
}


@dataclass(frozen=True, slots=True)
class Case:
    profile: str
    slo: Slo

    def attainment(self, pools: Mapping[Role, int], rps_per_gpu: float) -> float:
        """Prefills go first and whole, as in the vLLM of that time."""
        setup = Setup(
            plan=FleetPlan(pools, chunk_tokens=None, link_bytes_per_s=math.inf),
            profiles=load_profiles(self.profile),
            slo=self.slo,
            admission=False,
            prior_factor=1.0,
        )
        workload = synthetic(Lengths(512, 64), REQUESTS, rps_per_gpu * setup.plan.instances, random.Random(1))
        policy = build_policy("always_remote" if Role.PREFILL in pools else "always_local", {})
        return attainment(simulate(setup, workload, policy).outcomes, self.slo)

    def highest_rps(self, pools: Mapping[Role, int], low: float = 1.0, high: float = 9.0) -> float:
        """Per GPU, by bisection."""
        while high - low > EXACT_RPS:
            middle = (low + high) / 2
            if self.attainment(pools, middle) >= ENOUGH:
                low = middle
            else:
                high = middle
        return (low + high) / 2


LOOSE_TTFT = Case("a100-13b-tp1-vllm2023", Slo(ttft_s=0.4, tpot_s=0.04, max_gap_s=math.inf))
LOOSE_TPOT = Case("a100-13b-tp1-distserve", Slo(ttft_s=0.2, tpot_s=0.1, max_gap_s=math.inf))


def test_two_prefill_and_one_decode_gpu_serve_nearly_twice_as_much():
    """At 4.3 requests per second and GPU they meet the objectives, where one GPU for both fails at 2.35."""
    assert LOOSE_TTFT.attainment(SPLITS["2P1D"], 4.3) >= ENOUGH
    assert LOOSE_TTFT.attainment(TOGETHER, 2.35) < ENOUGH


@pytest.mark.long
def test_the_best_split_and_its_gain(measured):
    """Of all splits of up to three GPUs; the gain is over one GPU for both."""
    together = LOOSE_TTFT.highest_rps(TOGETHER)
    found = {name: LOOSE_TTFT.highest_rps(pools) for name, pools in SPLITS.items()}
    gain = found["2P1D"] / together
    measured.append(f"DistServe 0.4/0.04 s, rps per GPU: together {together:.2f}, {_shown(found)}, gain {gain:.2f}")
    assert max(found, key=found.__getitem__) == "2P1D"
    assert GAIN[0] <= gain <= GAIN[1]


@pytest.mark.long
def test_with_a_loose_tpot_splitting_loses(measured):
    """The same lengths at 0.2 s and 0.1 s, and DistServe's own engine: one GPU for both wins."""
    together = LOOSE_TPOT.highest_rps(TOGETHER)
    found = {name: LOOSE_TPOT.highest_rps(pools) for name, pools in SPLITS.items()}
    measured.append(f"DistServe 0.2/0.1 s, rps per GPU: together {together:.2f}, {_shown(found)}")
    assert together > max(found.values())


def _shown(found: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rps:.2f}" for name, rps in found.items())

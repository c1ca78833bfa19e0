"""A run is the same every time, and a policy that guesses badly and hears late does nearly as well as any."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from disagg_router.model import Role, Slo
from disagg_router.policies.registry import build_policy
from disagg_router.sim.drive import simulate
from disagg_router.sim.loop import VirtualLoop, run
from disagg_router.sim.model import FleetPlan
from disagg_router.sim.noise import NONE, Delay, Noise, factor
from disagg_router.sim.profiles import load_profiles
from disagg_router.sim.report import attainment
from disagg_router.sim.workloads import Cut, Pace, load
from disagg_router.sim.world import Setup

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
SLO = Slo(ttft_s=2.0, tpot_s=0.06, max_gap_s=0.25)
NOISY = Noise(output_sd=0.5, prefill_sd=0.1, state_age_s=0.3)
SINGLE = {"output": Noise(output_sd=0.5), "prefill": Noise(prefill_sd=0.1), "age": Noise(state_age_s=0.3)}
REQUESTS = 1500
ENOUGH = 0.95

ONE_RUN = """
import random
from disagg_router.model import Role, Slo
from disagg_router.policies.registry import build_policy
from disagg_router.sim.drive import simulate
from disagg_router.sim.model import FleetPlan
from disagg_router.sim.noise import Noise
from disagg_router.sim.profiles import load_profiles
from disagg_router.sim.workloads import Lengths, synthetic
from disagg_router.sim.world import Setup

setup = Setup(
    FleetPlan({Role.UNIFIED: 3}), load_profiles("h100-70b-tp4"), Slo(1.0, 0.03, 0.25), noise=Noise(0.5, 0.1, 0.3)
)
workload = synthetic(Lengths(3000, 200, sigma=0.8), 200, 6.0, random.Random(7))
print(simulate(setup, workload, build_policy("break_even", {})).outcomes)
"""


def outcomes(hash_seed: str) -> str:
    """Every request's figures, to the last bit."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_RUN],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_run_is_the_same_in_every_process():
    """Whatever the order of a set, and with every kind of noise: bit for bit."""
    first = outcomes("1")
    assert first.count("Outcome(") == 200
    assert len({first, outcomes("2")}) == 1


def test_what_is_told_late_comes_in_order():
    """Two things of one moment, and one of the next."""
    loop = VirtualLoop()
    heard: list[tuple[float, str]] = []

    async def main() -> None:
        delay = Delay(0.5, loop)
        for name in "abc":
            delay.tell(lambda name=name: heard.append((loop.time(), name)))
        await asyncio.sleep(1.0)

    run(main(), loop)
    assert heard == [(0.5, "a"), (0.5, "b"), (0.5, "c")]


def test_noise_is_right_on_average():
    """Its mean is 1 and its deviation the one asked for."""
    rng = random.Random(1)
    drawn = [factor(rng, 0.1) for _ in range(20_000)]
    mean = sum(drawn) / len(drawn)
    assert mean == pytest.approx(1.0, abs=0.003)
    assert (sum((one - mean) ** 2 for one in drawn) / len(drawn)) ** 0.5 == pytest.approx(0.1, abs=0.003)


@dataclass(frozen=True, slots=True)
class Cell:
    file: str
    format: str
    rate_rps: float

    def attainment(self, noise: Noise) -> float:
        """Of break_even on eight instances of no role; the same requests whatever the noise."""
        pace = Pace(self.rate_rps)
        workload = load(TRACES / self.file, self.format, random.Random(1), cut=Cut(REQUESTS), pace=pace).workload
        setup = Setup(FleetPlan({Role.UNIFIED: 8}), load_profiles("h100-70b-tp4"), SLO, noise=noise)
        return attainment(simulate(setup, workload, build_policy("break_even", {})).outcomes, SLO)


CONVERSATION = Cell("mooncake_conversation_trace.jsonl", "mooncake", 3.0)
CODE = Cell("azure2023_code.csv", "azure", 40.0)

SHORT_ANSWERS = pytest.mark.xfail(
    strict=True,
    reason="short answers are over before they are heard of, and steps are learned too short",
)


@pytest.mark.long
@pytest.mark.skipif(not TRACES.is_dir(), reason="the traces lie beside the clone")
@pytest.mark.parametrize("cell", [CONVERSATION, pytest.param(CODE, marks=SHORT_ANSWERS)], ids=lambda cell: cell.format)
def test_noise_costs_little(cell, measured):
    """Expected answers off by half, prefills by a tenth, everything heard 300 ms late: at least 0.95 of the goodput."""
    clean = cell.attainment(NONE)
    single = {name: cell.attainment(noise) for name, noise in SINGLE.items()}
    noisy = cell.attainment(NOISY)
    parts = ", ".join(f"{name} {found:.3f}" for name, found in single.items())
    measured.append(f"{cell.format} at {cell.rate_rps:g}/s: clean {clean:.3f}, all noise {noisy:.3f}; {parts}")
    assert noisy >= ENOUGH * clean

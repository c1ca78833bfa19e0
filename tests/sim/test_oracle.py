"""The oracle: its branches are the same world, its figures are theirs, and the run itself never notices."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path as File

import pytest

from disagg_router.model import Decision, Path, Reason, Role, Slo
from disagg_router.policies.registry import build_policy
from disagg_router.sim.drive import simulate
from disagg_router.sim.jobs import Job
from disagg_router.sim.loop import VirtualLoop, run
from disagg_router.sim.model import Arrival, FleetPlan, Workload
from disagg_router.sim.oracle import Sampling, Tried, good_so_far, sampled, simulate_with_branches
from disagg_router.sim.oracle_bound import Hindsight, hindsight
from disagg_router.sim.oracle_branches import alternatives
from disagg_router.sim.oracle_fork import Copy, split
from disagg_router.sim.profiles import Profile, load_profiles
from disagg_router.sim.regret import regret_figures
from disagg_router.sim.workloads import Lengths, synthetic
from disagg_router.sim.world import Setup
from tests.builders import TIMING, request, target, view
from tests.sim.engines import RoundTimings

SLO = Slo(ttft_s=1.0, tpot_s=0.05, max_gap_s=0.25)
NO_BOUND = Hindsight(1.0, 1.0)


class MostLoaded:
    """Sends everybody to where most are already: the first instance, from the first request on."""

    needs_token_count, soft_roles = True, True

    def decide(self, request, view):
        chosen = max(view.targets, key=lambda t: t.load.requests)
        return Decision(Path.LOCAL, chosen.target, Reason.POLICY)


def setup_of(pools, **changes):
    return Setup(FleetPlan(pools), load_profiles("h100-8b-tp1"), SLO, **changes)


def made_up(requests, rate_rps, prompt_tokens=3000, output_tokens=40):
    return synthetic(Lengths(prompt_tokens, output_tokens, 0.5), requests, rate_rps, random.Random(7))


def children():
    return File("/proc/self/task", str(os.getpid()), "children").read_text()


# --- a process that splits ----------------------------------------------------------------------------------------


def test_a_split_has_all_answers_in_order_and_leaves_nothing_behind():
    """Five copies, two at a time; one gives up and one never ends, which have answered nothing."""
    before = children(), len(os.listdir("/proc/self/fd"))
    found = split(5, at_once=2, limit_s=0.5)
    if isinstance(found, Copy):
        if found.number == 1:
            found.give_up()
        if found.number == 3:
            time.sleep(60)
        found.answer(f"copy {found.number}".encode())
    assert found == [b"copy 0", b"", b"copy 2", b"", b"copy 4"]
    assert (children(), len(os.listdir("/proc/self/fd"))) == before


# --- what else could be decided -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "soft", "taken", "changes", "found"),
    [
        # Hard roles: the other path, then nobody else decodes and the other prefill is left.
        ("p0 p1 d0", False, ("p0", "d0"), {}, ["d0", "p1>d0"]),
        ("p0 d0 d1", False, (None, "d0"), {}, ["p0>d0", "d1", "p0>d1"]),
        ("p0 d0", False, (None, "d0"), {"splittable": False}, []),
        ("p0 d0 d1", False, (None, "d0"), {"excluded": frozenset({target("p0")})}, ["d1"]),
        # Soft ones: any may do anything, and what is tested after the first two shares nothing with them.
        ("u0 u1 u2", True, (None, "u0"), {"splittable": False}, ["u1", "u2"]),
        ("u0", True, (None, "u0"), {}, []),
        ("u0 u1", True, (None, "u0"), {"prompt_tokens": None}, []),
    ],
)
def test_alternatives_are_valid_and_differ_from_what_was_taken(names, soft, taken, changes, found):
    """By hand: idle targets, so equals are in the fleet's order."""
    pairs = " ".join(f"{p}>{d}" for p in names.split() for d in names.split() if p != d)
    prefill, decode = taken
    path = Path.REMOTE_PREFILL if prefill else Path.LOCAL
    decided = Decision(path, target(decode), Reason.POLICY, target(prefill) if prefill else None)
    asked = request(**{"prompt_tokens": 1000, **changes})
    others = alternatives(asked, view(*names.split(), pairs=pairs, soft=soft), decided, 3)
    assert [f"{d.prefill.instance}>{d.decode.instance}" if d.prefill else d.decode.instance for d in others] == found
    assert all(d.chance is None for d in others)  # as with the one taken


def test_samples_are_spread_evenly():
    """One out of each tenth, and all of them when there are too few."""
    assert [number // 10 for number in sorted(sampled(100, 10, random.Random(1)))] == list(range(10))
    assert sampled(3, 10, random.Random(1)) == {0, 1, 2}


# --- roll-outs ----------------------------------------------------------------------------------------------------


def test_the_run_itself_is_not_disturbed():
    """The same outcomes and the same progress with branches and without; no process or descriptor is left."""
    setup, workload = setup_of({Role.PREFILL: 1, Role.DECODE: 2}), made_up(60, 25)
    heard, heard_alone = [], []
    alone = simulate(setup, workload, build_policy("break_even", {}), progress=heard_alone.append)
    before = children(), len(os.listdir("/proc/self/fd"))
    found, tried = simulate_with_branches(
        setup, workload, build_policy("break_even", {}), Sampling(decisions=6), progress=heard.append
    )
    assert (children(), len(os.listdir("/proc/self/fd"))) == before
    assert (found.outcomes, heard) == (alone.outcomes, heard_alone)
    assert len(tried) == 6
    assert all(len(one.branches) == 4 for one in tried)


def test_a_branch_like_the_one_taken_counts_what_it_counts():
    """Common random numbers: every copy of the decision taken is the run itself, whose own outcomes say what is right.
    With other noise it is another run."""
    setup, workload = setup_of({Role.UNIFIED: 2}), made_up(18, 30)  # so few that each is followed to the end
    sampling = Sampling(decisions=4, lucks=2, horizon_s=1000.0)
    found, tried = simulate_with_branches(
        setup, workload, build_policy("break_even", {}), sampling, others=lambda _r, _v, taken, most: [taken] * most
    )
    for one in tried:
        later = [outcome for outcome in found.outcomes if outcome.done_s > one.at_s or not outcome.done_s]
        assert [good for good, _ in one.good] == [sum(outcome.good(SLO) for outcome in later)] * 4
        assert one.counted == len(later)
        assert len({other for _, other in one.good}) == 1  # and that other one is the same in all branches


def test_a_silly_policy_has_regret():
    """All on one of two instances, at twice what it can do: each decision could have saved its own request at least."""
    setup, workload = setup_of({Role.UNIFIED: 2}, admission=False), made_up(80, 16)
    _, tried = simulate_with_branches(setup, workload, MostLoaded(), Sampling(decisions=12))
    figures = regret_figures(tried, NO_BOUND)
    assert figures["interval_90"][0] > 0.5
    assert figures["other_target"]["interval_90"][0] > 0.5  # which no choice of the best flatters


def test_without_a_choice_there_is_no_regret():
    """One instance, one path: nothing is lost, exactly."""
    _, tried = simulate_with_branches(
        setup_of({Role.UNIFIED: 1}), made_up(30, 20), build_policy("break_even", {}), Sampling(decisions=5)
    )
    figures = regret_figures(tried, NO_BOUND)
    assert (figures["decisions"], figures["regret_share"], figures["interval_90"]) == (5, 0.0, [0.0, 0.0])


@pytest.mark.parametrize(
    ("tokens", "first_s", "last_s", "gap_s", "now_s", "good"),
    [
        (0, 0.0, 0.0, 0.0, 10.9, True),  # the first token may still come in time
        (0, 0.0, 0.0, 0.0, 11.1, False),
        (1, 10.9, 10.9, 0.0, 11.1, True),
        (1, 11.1, 11.1, 0.0, 11.1, False),  # it came too late
        (11, 10.5, 11.0, 0.1, 11.1, True),  # 50 ms each
        (11, 10.5, 11.1, 0.1, 11.1, False),  # 60 ms
        (11, 10.5, 11.0, 0.3, 11.1, False),
        (11, 10.5, 11.0, 0.1, 11.3, False),  # a pause that is not over yet
    ],
)
def test_what_is_not_finished_is_judged_by_what_it_has_missed(tokens, first_s, last_s, gap_s, now_s, good):
    """Of an arrival at 10 s with objectives of 1 s, 50 ms and 250 ms."""

    async def main():
        job = Job(1, prompt_tokens=100, output_tokens=50, blocks=(), keys=())
        job.tokens, job.first_s, job.last_s, job.max_gap_s = tokens, first_s, last_s, gap_s
        return good_so_far(job if tokens else None, Arrival(0, 10.0, 100, 50, ()), SLO, now_s)

    assert run(main(), VirtualLoop()) is good


# --- figures ------------------------------------------------------------------------------------------------------


def tried_of(good, uncached_tokens, *paths):
    branches = [
        Decision(
            Path.REMOTE_PREFILL if path == "remote" else Path.LOCAL,
            target(f"u{i}"),
            Reason.POLICY,
            target("p0") if path == "remote" else None,
        )
        for i, path in enumerate(paths)
    ]
    return Tried(1, 0.0, 20.0, uncached_tokens, branches, good, 100)


def test_figures_by_hand():
    """Two decisions with two lucks each. The first: 10 taken, 12 and 9 by the branches, but with the second luck 11
    by all. What was best with one luck is judged by the other: 11 - 11, and the first of equals, 10 - 10: nothing."""
    first = tried_of([[10, 11], [12, 11], [9, 11]], 100, "local", "remote", "local")
    second = tried_of([[20, 20], [18, 20]], 9000, "remote", "remote")
    figures = regret_figures([first, second], Hindsight(0.9, 0.8))
    assert figures["regret_share"] == pytest.approx((1 + 0) / 2)  # 11.5 - 10.5 and nothing
    assert figures["of_counted"] == pytest.approx(0.5 / 100)
    assert figures["held_out"]["mean"] == pytest.approx(0.0)
    assert figures["interval_90"] == [0.0, 1.0]  # a quarter of all resamples has one of them only
    assert figures["other_path"]["mean"] == pytest.approx(1.0)
    assert figures["other_target"]["mean"] == pytest.approx((-0.5 - 1) / 2)
    assert figures["confusion"] == {
        "local": {"local": 0, "remote_prefill": 1},
        "remote_prefill": {"local": 0, "remote_prefill": 1},
    }
    assert figures["by_uncached_tokens"]["from 0"] == {"decisions": 1, "regret_share": 1.0}
    assert figures["by_uncached_tokens"]["from 8192"] == {"decisions": 1, "regret_share": 0.0}
    assert figures["hindsight"]["attainment"] == 0.8


def test_hindsight_by_hand():
    """A step takes 10 ms, 0.1 ms per prompt token and 1 ms per stream. Of four requests of 8,000 tokens (0.84 s in four
    chunks) and one of 20,000 (2.1 s) the long one is late on an idle instance. 8,000 tokens are 0.8 s of work beside
    others; one instance has 1.0 s for the first token after the last of them came at 1 s: 2.0 s, so two fit."""
    profile = Profile("round", RoundTimings(), 100_000, 1000.0, 1, 0.0, 0.0, TIMING)
    setup = Setup(FleetPlan({Role.UNIFIED: 1}, chunk_tokens=2000), {Role.UNIFIED: profile}, SLO)
    arrivals = [Arrival(i, 0.25 * i, 8000, 1, range(1000 * i, 1000 * i + 801)) for i in range(4)]
    arrivals.append(Arrival(4, 1.0, 20_000, 1, range(10_000, 12_001)))
    assert hindsight(setup, Workload("five", 10, arrivals)) == Hindsight(4 / 5, 2 / 5)
    longer = [*arrivals[:4], Arrival(4, 1.0, 17_000, 1, range(1701))]  # begins like the first: 8,000 of it are held
    assert hindsight(setup, Workload("five", 10, longer)).idle == 1.0  # by 0.95 s for the rest
    again = [*arrivals[:4], Arrival(4, 1.0, 8000, 1, arrivals[0].blocks)]
    assert hindsight(setup, Workload("five", 10, again)) == Hindsight(1.0, 3 / 5)


def test_the_command_reports_it_when_asked():
    """In the JSON and as rows of the table."""
    words = ("--profile", "h100-8b-tp1", "--synthetic", "512:8", "--rate", "50", "--requests", "12", "--pools")
    done = subprocess.run(
        [sys.executable, "-m", "disagg_router", "simulate", *words, "unified=2", "--regret", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)["regret"]
    assert found["decisions"] == 12
    assert {"regret_share", "interval_90", "confusion", "by_uncached_tokens", "hindsight"} <= found.keys()
    assert "lost per decision" in done.stderr

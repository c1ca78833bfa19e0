"""Learning from what is served: right values, wrong priors, outliers, a target that slows down and recovers."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from dataclasses import dataclass, field

import pytest

from disagg_router.cost.online import OnlineCosts
from disagg_router.cost.priors import Priors
from disagg_router.interfaces import CostModel, PrefillWork
from disagg_router.model import InstanceId, Target
from disagg_router.timing import CostSnapshot, LinkTiming, TargetTiming, attention
from tests.builders import pair, target

TRUTH = TargetTiming(
    prefill_a_s=0.004, prefill_b_s=2e-5, prefill_c_s=8e-10, step_d_s=0.006, step_e_s=1e-5, step_f_s=4e-8
)
LINK = LinkTiming(handoff_s=0.03, bytes_per_s=4e9)
NOISE = 0.1
P0, P1, D0 = target("p0"), target("p1"), target("d0")


def off_by(factor: float) -> Priors:
    """Every time `factor` of the true one."""
    fields = ("prefill_a_s", "prefill_b_s", "prefill_c_s", "step_d_s", "step_e_s", "step_f_s")
    wrong = dataclasses.replace(TRUTH, **{name: getattr(TRUTH, name) * factor for name in fields})
    return Priors(wrong, LinkTiming(LINK.handoff_s * factor, LINK.bytes_per_s / factor), 131_072)


def model(factor: float = 1.0) -> CostModel:
    return OnlineCosts(off_by(factor), lambda _: None)


def work(uncached_tokens: int, cached_tokens: int = 0, running: float = 0, context_tokens: float = 0) -> PrefillWork:
    steps = TRUTH.steps(uncached_tokens, running)
    return PrefillWork(uncached_tokens, attention(uncached_tokens, cached_tokens), steps, running, context_tokens)


@dataclass
class Fleet:
    """Serves prefills whose true times it knows, two a second; one in twenty takes ten times as long."""

    costs: CostModel
    outliers: float = 0.05
    now_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def prefill(self, at: Target, times: float = 1.0, uncached_tokens: int | None = None) -> None:
        self.now_s += 0.5
        tokens = uncached_tokens or round(math.exp(self.rng.uniform(math.log(64), math.log(16_000))))
        noise = self.rng.lognormvariate(0, NOISE) * (10 if self.rng.random() < self.outliers else 1)
        seconds = TRUTH.prefill_mean_s(tokens, 0) * times * noise
        self.costs.prefilled(at, work(tokens), seconds, self.now_s)

    def settle(self, *targets: Target, rounds: int = 20) -> None:
        for _ in range(rounds):
            for at in targets:
                self.prefill(at)

    def seen(self, at: Target, uncached_tokens: int = 3000) -> float:
        """What the model believes, in true times."""
        return prefill_s(self.costs.snapshot(self.now_s), at, uncached_tokens) / TRUTH.prefill_mean_s(
            uncached_tokens, 0
        )

    def sd(self, at: Target) -> float:
        return self.costs.snapshot(self.now_s).of(at).prefill_sd


def prefill_s(costs: CostSnapshot, at: Target, uncached_tokens: int) -> float:
    return costs.prefill_s(at, uncached_tokens, 0, 0, 0).mean_s


def test_who_has_seen_short_prompts_only_knows_nothing_of_long_ones() -> None:
    """Forty of 64 tokens tell what such a prompt takes, to a tenth or two, and of 16,000 hardly anything."""
    fleet = Fleet(model(50.0), outliers=0.0)
    for _ in range(40):
        fleet.prefill(P0, uncached_tokens=64)
    short, long = (fleet.costs.snapshot(fleet.now_s).prefill_s(P0, tokens, 0, 0, 0) for tokens in (64, 16_000))
    assert short.sd_s < 0.2 * short.mean_s
    assert long.sd_s > 0.5 * long.mean_s


# --- right values ---------------------------------------------------------------------------------------------------


def test_before_anything_is_served_it_believes_the_priors_and_says_so() -> None:
    """A relative deviation of 1 stands for not knowing."""
    costs = model().snapshot(5.0)
    assert prefill_s(costs, P0, 1000) == pytest.approx(0.004 + 1000 * 2e-5 + 500_000 * 8e-10)
    assert costs.step_s(D0, 8, 4000).mean_s == pytest.approx(0.006 + 8 * 1e-5 + 4000 * 4e-8)
    assert costs.transfer_s(P0, D0, 4e9, 2e9).mean_s == pytest.approx(1.5)
    assert costs.kv_bytes_per_token == 131_072
    assert (costs.target.prefill_sd, costs.target.step_sd, costs.link.sd) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("served", "seconds"),
    [
        pytest.param(work(1000), 0.004 + 0.02 + 4e-4, id="one step"),
        pytest.param(work(4096), 2 * 0.004 + 4096 * 2e-5 + 4096**2 / 2 * 8e-10, id="two steps"),
        pytest.param(work(100, 7000), 0.004 + 0.002 + 100 * 7050 * 8e-10, id="on top of cached tokens"),
        pytest.param(
            work(1000, 0, 10, 20_000),
            0.006 + 10 * 1e-5 + 20_000 * 4e-8 + 0.02 + 4e-4,
            id="beside streams, whose step takes longer than the prefill's own start",
        ),
        pytest.param(PrefillWork(0, 0.0, 1, 10, 20_000), 0.006 + 10 * 1e-5 + 20_000 * 4e-8, id="nothing uncached"),
    ],
)
def test_a_time_as_predicted_changes_no_coefficient(served: PrefillWork, seconds: float) -> None:
    """The model takes a prefill apart exactly as TargetTiming puts it together; times by hand."""
    costs = model()
    costs.prefilled(P0, served, seconds, 1.0)
    assert prefill_s(costs.snapshot(1.0), P0, 3000) == pytest.approx(TRUTH.prefill_mean_s(3000, 0))


def test_the_share_of_the_streams_is_not_learned_as_prefill() -> None:
    """A step beside ten streams takes 80 ms by itself; of 200 ms with 1000 prompt tokens in it 120 are theirs."""
    costs = OnlineCosts(Priors(TargetTiming(1e-9, 2e-5, 1e-15, 0.04, 0.004, 1e-15), LINK, 1.0), lambda _: None)
    for _ in range(30):
        costs.stepped(P0, 10, 0, 0.08, 1.0)
        costs.prefilled(P0, work(1000, 0, 10), 0.2, 1.0)
    timing = costs.snapshot(1.0).of(P0)
    assert timing.step_mean_s(10, 0) == pytest.approx(0.08, rel=0.01)
    assert timing.prefill_b_s == pytest.approx(0.12 / 1000, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_left_out(seconds: float) -> None:
    """A clock that stepped back, or a subtraction that left nothing."""
    costs = model()
    costs.prefilled(P0, work(1000), seconds, 1.0)
    costs.stepped(P0, 4, 1000, seconds, 1.0)
    costs.handed_off(pair("p0", "d0"), 1e6, seconds, 1.0)
    costs.transferred(InstanceId("d0"), 1e6, seconds, 1.0)
    now = costs.snapshot(1.0)
    assert prefill_s(now, P0, 1000) == pytest.approx(TRUTH.prefill_mean_s(1000, 0))
    assert now.link == dataclasses.replace(LINK, handoff_s=pytest.approx(0.03), bytes_per_s=pytest.approx(4e9), sd=1.0)


def test_chunk_tokens_are_the_targets_own() -> None:
    """Where nobody knows them, the prior's."""
    costs = OnlineCosts(off_by(1), {P0: 256}.get)
    for at in (P0, P1):
        costs.prefilled(at, work(1000), 0.02, 1.0)
    now = costs.snapshot(1.0)
    assert [now.of(at).chunk_tokens for at in (P0, P1, D0)] == [256, 2048, 2048]


# --- wrong priors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.5, 2.0, 0.02, 50.0])
@pytest.mark.parametrize(
    ("served", "outliers", "within"),
    [
        pytest.param(4, 0.0, 0.4, id="after 4"),
        pytest.param(10, 0.0, 0.25, id="after 10"),
        pytest.param(40, 0.05, 0.25, id="after 40 with outliers"),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_wrong_priors_are_mended_fast(factor: float, served: int, outliers: float, within: float, seed: int) -> None:
    """With 10 % noise, at every length, also for a target that never served; half the prefills each on two others."""
    fleet = Fleet(model(factor), outliers, rng=random.Random(seed))
    fleet.settle(P0, P1, rounds=served // 2)
    for tokens in (200, 1000, 3000, 8000):
        assert fleet.seen(P0, tokens) == pytest.approx(1, rel=within)
        assert fleet.seen(D0, tokens) == pytest.approx(1, rel=within)


def test_coefficients_are_recovered_although_each_prior_is_wrong_in_its_own_way() -> None:
    """300 spread-out prefills with 10 % noise, no outliers; the fixed part is the smallest, so the least certain."""
    prior = dataclasses.replace(TRUTH, prefill_a_s=0.04, prefill_b_s=1e-5, prefill_c_s=3.2e-9)
    fleet = Fleet(OnlineCosts(Priors(prior, LINK, 1.0), lambda _: None), outliers=0)
    fleet.settle(P0, P1, rounds=150)
    fitted = fleet.costs.snapshot(fleet.now_s).target
    assert fitted.prefill_a_s == pytest.approx(0.004, rel=0.3)
    assert fitted.prefill_b_s == pytest.approx(2e-5, rel=0.15)
    assert fitted.prefill_c_s == pytest.approx(8e-10, rel=0.3)


def test_steps_are_learned_likewise() -> None:
    """Mean step times over batches of 1 to 64, from a prior ten times too high."""
    costs, rng = model(10), random.Random(2)
    for i in range(60):
        running = rng.randint(1, 64)
        context = running * rng.uniform(200, 4000)
        costs.stepped(D0, running, context, TRUTH.step_mean_s(running, context) * rng.lognormvariate(0, NOISE), i)
    timing = costs.snapshot(60).of(D0)
    for running, context in ((1, 500), (16, 16_000), (64, 200_000)):
        assert timing.step_mean_s(running, context) == pytest.approx(TRUTH.step_mean_s(running, context), rel=0.1)


def test_uncertainty_falls_to_the_spread() -> None:
    """From 1 to little more than the noise of 10 % within 20 prefills of one target."""
    fleet = Fleet(model(0.5), outliers=0)
    assert fleet.sd(P0) == 1.0
    fleet.settle(P0, rounds=20)
    assert NOISE / 2 < fleet.sd(P0) < 2 * NOISE
    assert fleet.sd(P0) < fleet.sd(D0) < 1.0  # whoever did not serve yet may be other hardware


# --- one target goes its own way ------------------------------------------------------------------------------------


def test_a_slowdown_is_seen_within_four_prefills_and_only_there() -> None:
    """A prefill instance stopped four fifths of the time, 5x slower: the second prefill already shows it."""
    fleet = Fleet(model(), outliers=0)
    fleet.settle(P0, P1)
    fleet.prefill(P0, times=5)
    fleet.prefill(P0, times=5)
    assert fleet.seen(P0) > 2.5
    fleet.prefill(P0, times=5)
    fleet.prefill(P0, times=5)
    assert fleet.seen(P0) == pytest.approx(5, rel=0.25)
    assert fleet.seen(P1) == pytest.approx(1, rel=0.15)
    assert fleet.seen(D0) == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("times", [10, 0.1, 1000])
def test_one_outlier_is_ignored(times: float) -> None:
    """Whatever its size, it moves the prediction by less than a fifth."""
    fleet = Fleet(model(), outliers=0)
    fleet.settle(P0, P1)
    before = fleet.seen(P0, 1000)
    fleet.prefill(P0, times=times)
    assert fleet.seen(P0, 1000) == pytest.approx(before, rel=0.2)


def test_a_first_prefill_that_took_for_ever_is_overcome_by_two_good_ones() -> None:
    """Warm-up: the first one of a fresh engine has been seen to take 53 s."""
    fleet = Fleet(model(), outliers=0)
    fleet.prefill(P0, times=700)
    for _ in range(3):
        fleet.prefill(P0)
    assert fleet.seen(P0) == pytest.approx(1, rel=0.5)


def test_a_target_that_is_not_used_is_trusted_again() -> None:
    """Slow for a minute, then left alone: in half a minute it is worth a try, and until then it is uncertain."""
    fleet = Fleet(model(), outliers=0)
    fleet.settle(P0, P1)
    for _ in range(60):
        fleet.prefill(P0, times=5)
        fleet.prefill(P1)
    believed, sds = [], []
    for _ in range(7):
        believed.append(fleet.seen(P0))
        sds.append(fleet.sd(P0))
        fleet.now_s += 10
    assert believed == sorted(believed, reverse=True)
    assert believed[0] == pytest.approx(5, rel=0.2)
    assert believed[3] < 1.4  # 30 s
    assert believed[6] < 1.15  # 60 s
    assert max(sds) == sds[1] > 2 * sds[0]


def test_one_prefill_shows_that_an_unused_target_is_still_slow() -> None:
    """Half a minute on it may be either, so the first measurement is believed; so is one that shows it recovered."""
    for times in (5, 1):
        fleet = Fleet(model(), outliers=0)
        fleet.settle(P0, P1)
        for _ in range(10):
            fleet.prefill(P0, times=5)
        fleet.now_s += 20
        fleet.prefill(P0, times=times)
        assert fleet.seen(P0) == pytest.approx(times, rel=0.3)


def test_a_recovery_that_is_served_is_seen_at_once() -> None:
    """Two prefills at the old speed are enough."""
    fleet = Fleet(model(), outliers=0)
    fleet.settle(P0, P1)
    for _ in range(10):
        fleet.prefill(P0, times=5)
    fleet.prefill(P0)
    fleet.prefill(P0)
    assert fleet.seen(P0) == pytest.approx(1, rel=0.25)


def test_slower_hardware_stays_slower() -> None:
    """A level of its own, learned when the target is new: ten minutes unused do not change it."""
    fleet = Fleet(model(), outliers=0)
    fleet.settle(P0)
    for _ in range(20):
        fleet.prefill(P1, times=2.5)
        fleet.prefill(P0)
    before_sd = fleet.sd(P1)
    fleet.now_s += 600
    assert fleet.seen(P1) == pytest.approx(2.5, rel=0.2)
    assert fleet.seen(P0) == pytest.approx(1, rel=0.2)
    assert before_sd + 0.2 > fleet.sd(P1) > before_sd + 0.05


# --- links ----------------------------------------------------------------------------------------------------------


def test_a_handoffs_fixed_cost_and_its_bandwidth_are_told_apart() -> None:
    """40 handoffs of 100 kB to 1 GB, priors wrong by ten; a pair that never moved anything has the fleet's values."""
    costs, rng = model(10), random.Random(3)
    for i in range(40):
        moved = 10 ** rng.uniform(5, 9)
        seconds = (0.03 + moved / 4e9) * rng.lognormvariate(0, NOISE)
        costs.handed_off(pair("p0", rng.choice(("d0", "d1"))), moved, seconds, i)
    now = costs.snapshot(40)
    for link in (now.between(P0, D0), now.between(P1, D0)):
        assert link.handoff_s == pytest.approx(0.03, rel=0.15)
        assert link.bytes_per_s == pytest.approx(4e9, rel=0.15)


def test_the_engines_counters_speak_of_bandwidth_only() -> None:
    """Pulls at 4 GB/s where 0.4 was believed."""
    costs = model(10)
    for i in range(3):
        costs.transferred(InstanceId("d0"), 8e9, 2.0, i)
    link = costs.snapshot(3).link
    assert link.bytes_per_s == pytest.approx(4e9, rel=0.1)
    assert link.handoff_s == pytest.approx(0.3)


def test_a_pair_that_is_slower_than_the_others_is_known_for_it() -> None:
    """Across racks, say; the others and the pairs without history are not."""
    costs = model()
    for i in range(30):
        for name, times in (("d0", 3.0), ("d1", 1.0), ("d2", 1.0)):
            costs.handed_off(pair("p0", name), 4e8, (0.03 + 0.1) * times, i)
    now = costs.snapshot(30)
    took = [now.between(P0, target(name)).handoff_s for name in ("d0", "d1", "d2", "d3")]
    assert took[0] / took[1] == pytest.approx(3, rel=0.1)
    assert took[1] == pytest.approx(took[2], rel=0.1)
    assert took[3] < 2 * took[1]


# --- snapshots ------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_the_same_object_until_there_is_something_new() -> None:
    """An observation makes a new one, and so does a second of age, since a drift fades by itself."""
    costs = model()
    first = costs.snapshot(0.0)
    assert costs.snapshot(1e6) is first
    costs.prefilled(P0, work(1000), 0.03, 1e6)
    second = costs.snapshot(1e6)
    assert second is not first
    assert costs.snapshot(1e6 + 0.9) is second
    assert costs.snapshot(1e6 + 1.1) is not second


def test_a_snapshot_that_was_handed_out_never_changes() -> None:
    """A policy may hold on to one."""
    costs = model()
    costs.prefilled(P0, work(1000), 0.03, 1.0)
    before = costs.snapshot(1.0)
    was = dict(before.targets)
    costs.prefilled(P0, work(1000), 3.0, 1.1)
    costs.prefilled(P1, work(1000), 3.0, 1.2)
    assert costs.snapshot(1.2).of(P0) != was[P0]
    assert dict(before.targets) == was


def test_a_target_that_is_forgotten_starts_anew() -> None:
    """Its pairs too; the fleet's fit keeps what it learned."""
    costs = model()
    for i in range(20):
        costs.prefilled(P0, work(1000), 0.1, i)
        costs.prefilled(P1, work(1000), 0.025, i)
        costs.handed_off(pair("p0", "d0"), 1e6, 0.03, i)
        costs.handed_off(pair("p1", "d0"), 1e6, 0.03, i)
    costs.forget(P0)
    costs.forget(target("p9"))
    now = costs.snapshot(20)
    assert set(now.targets) == {P1}
    assert set(now.links) == {pair("p1", "d0")}
    assert now.of(P0) == now.target


def test_what_it_costs_is_printed() -> None:
    """CPU time per observation and per snapshot with 64 targets and 512 pairs; not asserted."""
    costs = model()
    fleet = [target(f"u{i}") for i in range(64)]
    pairs = [pair(f"u{i}", f"u{(i + j) % 64}") for i in range(64) for j in range(1, 9)]
    works = [work(100 * (i + 1), 0, 4, 8000) for i in range(64)]

    def per_call_us(calls: int, call: object) -> float:
        assert callable(call)
        start_s = time.process_time()
        for i in range(calls):
            call(i)
        return (time.process_time() - start_s) / calls * 1e6

    def learn_and_look(i: int) -> None:
        costs.stepped(fleet[i % 64], 8, 4000, 0.0065, 200.0 + i / 1000)
        costs.snapshot(200.0 + i / 1000)

    measured = {
        "prefilled": per_call_us(3000, lambda i: costs.prefilled(fleet[i % 64], works[i % 64], 0.05, i / 100)),
        "stepped": per_call_us(3000, lambda i: costs.stepped(fleet[i % 64], 8, 4000, 0.0065, 30 + i / 100)),
        "handed_off": per_call_us(3000, lambda i: costs.handed_off(pairs[i % 512], 1e8, 0.06, i / 100)),
        "snapshot, all of it aged": per_call_us(50, lambda i: costs.snapshot(100.0 + 2 * i)),
        "stepped, and a snapshot": per_call_us(900, learn_and_look),
        "the same snapshot": per_call_us(3000, lambda _: costs.snapshot(200.9)),
    }
    print("".join(f"\n  {name}: {us:.1f} us" for name, us in measured.items()))

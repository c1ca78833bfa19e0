"""Decode steps, timed on the streams that ran undisturbed."""

from __future__ import annotations

import pytest

from disagg_router.interfaces import Claim, EngineLoad
from disagg_router.model import Slo, Target
from disagg_router.routing.leases import LeaseBook
from disagg_router.routing.steps import StepTimer
from disagg_router.routing.streams import Stream, StreamBook
from tests.builders import target
from tests.fakes.costs import FixedCosts
from tests.fakes.now import Now

D0 = target("d0")
CLAIM = Claim(decode_kv_bytes=1000.0, prefill_tokens=10, prefill_s=0.01)


class World:
    """Two streams with prompts of 100 tokens on one target, whose engine makes a step every 25 ms."""

    def __init__(self) -> None:
        self.now, self.costs, touched = Now(), FixedCosts(), set[Target]()
        self.book = StreamBook(self.costs, touched)
        self.leases = LeaseBook(costs=self.costs, streams=self.book, touched=touched, now_s=self.now)
        self.timer = StepTimer(self.costs, self.book, self.leases)
        self.streams: list[Stream] = []
        for _ in range(2):
            self.open()
        self.timer.tick(self.now.s)

    def open(self) -> None:
        slo = Slo(ttft_s=1.0, tpot_s=0.1, max_gap_s=1.0)
        opened = self.book.open(D0, slo, prompt_tokens=100, expected_tokens=50, max_tokens=None, now_s=self.now.s)
        self.streams.append(opened)

    def run(self, steps: int, step_s: float = 0.025) -> None:
        for _ in range(steps):
            self.now.s += step_s
            for stream in self.streams:
                stream.count(1, self.now.s)

    def tick(self) -> None:
        self.timer.tick(self.now.s)


def test_steps_are_timed_between_two_looks():
    """10 of them, with 200 tokens of context at the start and 220 at the end."""
    world = World()
    world.run(10)
    world.tick()
    assert world.costs.steps == [(D0, 2, 210.0, pytest.approx(0.025), world.now.s)]


def test_a_look_within_a_step_does_not_matter():
    """From one step's tokens to another's, whenever the looks are."""
    world = World()
    world.run(10)
    world.now.s += 0.02
    world.tick()
    world.now.s -= 0.02
    world.run(10)
    world.tick()
    assert [seconds for _, _, _, seconds, _ in world.costs.steps] == pytest.approx([0.025, 0.025])


def test_too_few_steps_wait_for_more():
    """5 and 5 are reported together."""
    world = World()
    world.run(5)
    world.tick()
    assert world.costs.steps == []
    world.run(5)
    world.tick()
    assert [seconds for _, _, _, seconds, _ in world.costs.steps] == pytest.approx([0.025])


@pytest.mark.parametrize("what", ["comes", "goes", "prefill-ran", "prefill-runs", "unseen-answer", "others-came"])
def test_what_was_disturbed_is_left_out(what: str):
    """Its steps are other ones; the next undisturbed ones count again."""
    world = World()
    world.run(10)
    lease = None
    match what:
        case "comes":
            world.open()
        case "goes":
            world.streams.pop().close()
        case "prefill-ran":
            world.leases.prefill(D0, CLAIM, observed=True).done()
        case "prefill-runs":
            lease = world.leases.prefill(D0, CLAIM, observed=True)
        case "unseen-answer":
            world.leases.decode(D0, CLAIM, streamed=False)
        case "others-came":
            world.leases.reconcile(D0, EngineLoad(running=7, waiting=0, kv_usage=0.0, kv_capacity_tokens=1000))
    world.tick()
    assert world.costs.steps == []
    if lease is not None:
        lease.done()
        world.tick()
    world.run(10)
    world.tick()
    assert len(world.costs.steps) == (what != "unseen-answer")


def test_others_streams_are_counted():
    """3 that this router does not see, with 100 tokens each by the KV that they use."""
    world = World()
    load = EngineLoad(running=3, waiting=0, kv_usage=0.5, kv_capacity_tokens=1000)
    world.leases.reconcile(D0, load)
    world.tick()
    world.run(10)
    world.tick()
    # 50,000 bytes are 500 tokens, of which 200 were of the two streams; no decode lease says they are ours.
    assert world.costs.steps == [(D0, 5, 510.0, pytest.approx(0.025), world.now.s)]

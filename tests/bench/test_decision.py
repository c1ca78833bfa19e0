"""The decision benchmark on a small world: everything it says it times is there."""

from __future__ import annotations

import itertools

from disagg_router.bench.decision import TITLES, as_data, sample
from disagg_router.bench.decision_traffic import PER_TARGET
from disagg_router.bench.decision_world import KNOWN_PROMPTS, Size, World
from disagg_router.routing.fleet import PARTNERS
from disagg_router.routing.token_hashes import chain

SMALL = Size(targets=12, prompt_tokens=512, block_tokens=16, blocks=20_000)


def test_the_world_is_as_large_as_asked_for():
    """Targets, partners and blocks; the same seed makes the same one."""
    world = World(SMALL, seed=1)
    view = world.traffic.view()
    assert world.index.stats().entries == SMALL.blocks
    assert len(view.targets) == SMALL.targets
    assert {len(partners) for partners in view.partners.values()} == {PARTNERS}
    assert all(name not in partners for name, partners in view.partners.items())
    assert list(World(SMALL, seed=1).prompts(3)) == list(World(SMALL, seed=1).prompts(3))


def test_its_traffic_goes_on():
    """Some targets are idle, the others have streams and some a queue of prefills; time passes and loads change."""
    traffic = World(SMALL, seed=1).traffic
    before = traffic.view()
    loads = [view.load for view in before.targets]
    assert {bool(load.requests) for load in loads} == {True, False}
    assert any(load.prefills for load in loads)
    assert sum(load.streams.running + load.prefills for load in loads) == PER_TARGET * SMALL.targets
    traffic.step()
    after = traffic.view()
    assert after.now_s > before.now_s
    assert after.targets != before.targets


def test_half_of_the_prompts_are_partly_cached_somewhere():
    """By 3 standard errors of 400 prompts (0.075); a known prompt may also be cut before its first block ends."""
    world = World(SMALL, seed=2)
    prompts = list(world.prompts(400))
    found = [world.index.cached_tokens(chain(tokens, SMALL.block_tokens), SMALL.block_tokens) for tokens in prompts]
    assert {len(tokens) for tokens in prompts} == {SMALL.prompt_tokens}
    assert len({tuple(tokens) for tokens in prompts}) == len(prompts)
    assert 0.5 - 0.075 - 1 / 32 < sum(map(bool, found)) / len(found) < 0.5 + 0.075
    depths = {held.gpu_tokens for one in found for held in one.values()}
    assert len(depths) > KNOWN_PROMPTS / 2


def test_every_part_is_timed_in_every_decision():
    """And the sum is theirs."""
    samples, _ = sample(World(SMALL, seed=3), decisions=20)
    assert list(samples) == list(TITLES)
    for *parts, whole in zip(*samples.values(), strict=True):
        assert whole == sum(parts)
        assert min(parts) > 0


def test_the_bound_is_for_the_99th_percentile_of_the_sum():
    """With 100 decisions one may be slower."""
    steady = {part: [0.0002] * 100 for part in TITLES}
    for slow, holds in ((1, True), (2, False)):
        sums = list(itertools.chain([0.0009] * (100 - slow), [0.005] * slow))
        data = as_data({**steady, "sum": sums}, 1.0, SMALL, 0)
        assert data["holds"] is holds
        assert data["parts"]["sum"]["max_ms"] == 5.0
        assert data["parts"]["lookup"] == {"p50_ms": 0.2, "p99_ms": 0.2, "max_ms": 0.2}

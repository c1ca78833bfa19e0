"""The contenders and their turns; a router in front of scripted engines stands in for the real thing."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path

import pytest

from disagg_router.bench.contenders import CONTENDERS, Contender, chosen, router_config
from disagg_router.bench.load import Load, RoundPlan
from disagg_router.bench.processes import EngineSettings, workshop
from disagg_router.bench.turns import Plan, take_turn
from disagg_router.config import load_config
from disagg_router.controller.processes import is_alive
from disagg_router.errors import ConfigError
from disagg_router.model import Role
from tests.fakes.engine import FakeEngine

URLS = ("http://127.0.0.1:8101", "http://127.0.0.1:8102")
SETTINGS = EngineSettings("/models/tiny", "tiny", {"block-size": 32})
LOAD = Load("tiny", streams=2, chat_prompt_tokens=20, chat_output_tokens=4, long_prompt_tokens=900)


def test_the_contenders_are_those_that_were_agreed_on():
    """The subject gets no ratio and no threshold; splitting by rule gets one of each role."""
    agreed = {
        "break_even": ("break_even", {}, "unified unified", 2048),
        "unified_2048": ("always_local", {}, "unified unified", 2048),
        "unified_256": ("always_local", {}, "unified unified", 256),
        "always_remote": ("always_remote", {}, "prefill decode", 2048),
        "threshold_1000": ("threshold", {"tokens": 1000}, "prefill decode", 2048),
    }
    found = {c.name: (c.policy, dict(c.options), " ".join(c.roles), c.chunk_tokens) for c in CONTENDERS}
    assert found == agreed


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_each_has_a_config_that_the_router_takes(contender, tmp_path):
    """With the arguments the engines were started with, so that they may exchange KV."""
    file = tmp_path / "config.yaml"
    args = SETTINGS.with_chunk(contender.chunk_tokens)
    file.write_text(router_config(contender, model="/models/tiny", served_name="tiny", args=args, urls=URLS))
    config = load_config(file)
    assert config.router.policy.name == contender.policy
    assert config.router.policy.options == contender.options
    assert config.slo() == dataclasses.replace(config.slo(), ttft_s=0.5, tpot_s=0.025, max_gap_s=0.1)
    assert config.engine.args == {"block-size": 32, "max-num-batched-tokens": contender.chunk_tokens}
    assert config.fleet is not None
    assert [(one.url, one.role) for one in config.fleet.static or []] == list(zip(URLS, contender.roles, strict=True))


def test_some_may_be_chosen():
    """Each once, in the order given; a wrong name is told with the right ones."""
    assert [one.name for one in chosen("unified_256, unified_2048,unified_256")] == ["unified_256", "unified_2048"]
    with pytest.raises(ConfigError, match=r"'unified' is no contender: use some of break_even, unified_2048"):
        chosen("unified")


def test_a_round_is_the_same_for_all_but_for_the_prompts():
    """Arrivals are shared, the order of the turns changes, and no prompt is sent twice."""
    plan = Plan(CONTENDERS, LOAD, rounds=6, round_s=40, seed=7)
    again = Plan(CONTENDERS, LOAD, rounds=6, round_s=40, seed=7)
    assert [plan.arrivals_s(n) for n in range(6)] == [again.arrivals_s(n) for n in range(6)]
    assert plan.arrivals_s(1) != plan.arrivals_s(2)
    orders = {tuple(plan.order(n)) for n in range(1, 7)}
    assert len(orders) > 1
    assert {frozenset(order) for order in orders} == {frozenset(one.name for one in CONTENDERS)}
    first = {plan.prompts(n, name).getrandbits(64) for n in range(1, 7) for name in plan.order(n)}
    assert len(first) == 6 * len(CONTENDERS)


async def test_a_router_has_its_turn_and_is_paused_after_it(tmp_path):
    """Its process is real and ends with the workshop; a pause does not keep it from ending."""
    fabric: dict[str, FakeEngine] = {}
    contender = Contender("split", "threshold", (Role.PREFILL, Role.DECODE), {"tokens": 256})
    said: list[str] = []
    async with (
        FakeEngine(engine_id="e0", fabric=fabric) as prefill,
        FakeEngine(engine_id="e1", fabric=fabric) as decode,
    ):
        async with workshop(tmp_path, said.append) as shop:
            router = await shop.router(contender, SETTINGS, (prefill.url, decode.url))
            for turn in range(2):
                figures = await take_turn(shop, router, LOAD, RoundPlan(0.5, 5.0, (0.1, 0.2)), random.Random(turn), 0.0)
                assert (figures.long_done, figures.failed) == (
                    2,
                    0,
                )  # what admission makes of the chats is its own matter
                assert figures.chats_done
                assert await stopped(router.pid)
        assert not is_alive(router.pid)
    assert said == ["starting the router of split", "stopping everything"]


async def stopped(pid: int) -> bool:
    """SIGSTOP takes effect a moment after it was sent."""
    for _ in range(100):
        if state(pid) == "T":
            return True
        await asyncio.sleep(0.02)
    return False


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]

"""Turn by turn: every contender under the same load on the same engines, one at a time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from disagg_router.bench.contenders import Contender
from disagg_router.bench.exchange import Endpoint
from disagg_router.bench.figures import RoundFigures, read_round
from disagg_router.bench.load import Load, RoundPlan, poisson_arrivals, run_round
from disagg_router.bench.processes import HOST, EngineSettings, RunningRouter, Workshop, workshop

SETTLE_S = 2.5
DRAIN_S = 15.0
# Not counted: engines have run each shape once, and a policy that learns has seen both kinds of prompt.
WARM_UP = RoundPlan(round_s=10.0, drain_s=DRAIN_S, arrivals_s=(1.0, 4.0, 7.0))


@dataclass(frozen=True, slots=True)
class Plan:
    """`seed` fixes arrivals, prompts and the order of the turns."""

    contenders: Sequence[Contender]
    load: Load
    rounds: int
    round_s: float
    seed: int

    def arrivals_s(self, round_: int) -> tuple[float, ...]:
        """The same for every contender of a round, so that luck with arrivals falls out of their difference."""
        return poisson_arrivals(random.Random(f"{self.seed} {round_}"), self.load.long_gap_s, self.round_s)

    def order(self, round_: int) -> list[str]:
        names = [one.name for one in self.contenders]
        random.Random(f"{self.seed} order {round_}").shuffle(names)
        return names

    def prompts(self, round_: int, name: str) -> random.Random:
        return random.Random(f"{self.seed} {round_} {name}")


async def measure(
    plan: Plan, settings: EngineSettings, folder: Path, say: Callable[[str], None]
) -> dict[str, list[RoundFigures]]:
    """Contender -> its rounds. Raises ConfigError, LaunchError."""
    found: dict[str, list[RoundFigures]] = {one.name: [] for one in plan.contenders}
    async with workshop(folder, say) as shop:
        routers = await _routers(plan, settings, shop, say)
        for round_ in range(1, plan.rounds + 1):
            round_plan = RoundPlan(plan.round_s, DRAIN_S, plan.arrivals_s(round_))
            for name in plan.order(round_):
                figures = await take_turn(shop, routers[name], plan.load, round_plan, plan.prompts(round_, name))
                found[name].append(figures)
                say(f"round {round_} of {plan.rounds}, {name}: {_shown(figures)}")
    return found


async def _routers(
    plan: Plan, settings: EngineSettings, shop: Workshop, say: Callable[[str], None]
) -> dict[str, RunningRouter]:
    """Each warmed up, then paused: an idle router probes its engines and follows their events, on the same cores."""
    urls = await shop.engines(settings, sorted({one.chunk_tokens for one in plan.contenders}))
    routers = {}
    for one in plan.contenders:
        router = routers[one.name] = await shop.router(one, settings, urls[one.chunk_tokens])
        warm = await take_turn(shop, router, plan.load, WARM_UP, plan.prompts(0, one.name))
        say(f"warmed up {one.name}: {_shown(warm)}")
    return routers


async def take_turn(
    shop: Workshop, router: RunningRouter, load: Load, plan: RoundPlan, rng: random.Random, settle_s: float = SETTLE_S
) -> RoundFigures:
    """One round on this router, which is paused afterwards. Raises LaunchError when it does not come back."""
    router.resume()
    try:
        await asyncio.sleep(settle_s)
        await shop.settled(router)
        return read_round(await run_round(Endpoint(HOST, router.port, time.perf_counter), load, plan, rng))
    finally:
        router.pause()


def _shown(figures: RoundFigures) -> str:
    lost = f", {figures.refused} refused, {figures.failed} failed" if figures.refused or figures.failed else ""
    return (
        f"gap {figures.longest_gap_ms:.0f} ms, TTFT p99 {figures.chat_ttft_p99_ms:.0f} ms, "
        f"{figures.chats_done} chats, {figures.long_done}/{figures.long_sent} long prompts{lost}"
    )

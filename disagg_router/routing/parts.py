"""The objects that route requests, put together: the same for a router process and for a simulation of one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from disagg_router.errors import UpstreamError
from disagg_router.interfaces import (
    AdmissionPolicy,
    Clock,
    CostModel,
    EngineClient,
    KVConnector,
    OutputPredictor,
    PathPolicy,
    RoleBalancer,
    RouteObserver,
)
from disagg_router.model import Body, Target
from disagg_router.routing.checked_tokenizer import CheckedTokenizer
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.gauging import Gauge
from disagg_router.routing.legs import LegLimits, Legs
from disagg_router.routing.loads import Loads
from disagg_router.routing.placement import Placer
from disagg_router.routing.prefix_index import PrefixIndex
from disagg_router.routing.prompts import PromptReader
from disagg_router.routing.queue import FairQueue
from disagg_router.routing.routed_prefixes import RoutedPrefixes
from disagg_router.routing.router import Router
from disagg_router.routing.views import Views


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """`look_s`: so often every engine is asked for its load."""

    legs: LegLimits
    max_gap_s: float  # the configured objective
    queue: int
    max_wait_s: float
    index_entries: int
    look_s: float


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What decides: the seams of design.md section 5 that can be swapped one by one."""

    policy: PathPolicy
    admission: AdmissionPolicy
    balancer: RoleBalancer
    costs: CostModel
    outputs: OutputPredictor


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What routing meets: the fleet as it is published, the engines, who listens, time and chance. `failed` hears of
    every leg that went wrong."""

    fleet: Callable[[], Fleet]
    client: EngineClient
    connector: KVConnector
    observer: RouteObserver
    failed: Callable[[Target, UpstreamError], None]
    clock: Clock
    rng: random.Random


@dataclass(frozen=True, slots=True)
class RoutingParts:
    router: Router
    gauge: Gauge
    loads: Loads
    views: Views
    index: PrefixIndex
    routed: RoutedPrefixes
    queue: FairQueue
    prompts: PromptReader

    def forget(self, target: Target) -> None:
        """What it holds: its engine is gone, or is another process now."""
        self.index.forget(target)
        self.routed.forget(target)


def routing_parts(
    behaviour: Behaviour,
    settings: RoutingSettings,
    around: Surroundings,
    *,
    tokenizer: CheckedTokenizer | None = None,
    lora_of: Callable[[Body], str | None] = lambda _: None,
) -> RoutingParts:
    """Build it inside a running event loop."""
    costs, fleet, client, clock = behaviour.costs, around.fleet, around.client, around.clock
    loads = Loads(costs=costs, now_s=clock.now_s)
    views = Views(fleet, loads, costs)
    index, routed = (
        PrefixIndex(settings.index_entries),
        RoutedPrefixes(clock.now_s, capacity_tokens=_capacity_of(fleet)),
    )
    queue = FairQueue(bound=settings.queue, max_wait_s=settings.max_wait_s, clock=clock)
    prompts = PromptReader(
        client=client,
        fleet=fleet,
        index=index,
        requests_on=lambda target: loads.of(target).requests,
        failed=around.failed,
        rng=around.rng,
        local=tokenizer,
        routed=routed,
        lora_of=lora_of,
    )
    router = Router(
        placer=_placer(behaviour, settings, around, loads, views, queue),
        legs=_legs(behaviour, settings, around),
        prompts=prompts,
        outputs=behaviour.outputs,
        failed=around.failed,
        waiting_requests=settings.queue,
        now_s=clock.now_s,
    )
    gauge = Gauge(
        fleet=fleet,
        client=client,
        loads=loads,
        costs=costs,
        views=views,
        balancer=behaviour.balancer,
        queue=queue,
        interval_s=settings.look_s,
        clock=clock,
    )
    return RoutingParts(router, gauge, loads, views, index, routed, queue, prompts)


def _capacity_of(fleet: Callable[[], Fleet]) -> Callable[[Target], int | None]:
    def tokens(target: Target) -> int | None:
        instance = fleet().instances.get(target.instance)
        return None if instance is None else instance.rank_capacity_tokens

    return tokens


def _placer(
    behaviour: Behaviour, settings: RoutingSettings, around: Surroundings, loads: Loads, views: Views, queue: FairQueue
) -> Placer:
    return Placer(
        policy=behaviour.policy,
        admission=behaviour.admission,
        queue=queue,
        views=views,
        loads=loads,
        observer=around.observer,
        max_gap_s=settings.max_gap_s,
        now_s=around.clock.now_s,
        rng=around.rng,
    )


def _legs(behaviour: Behaviour, settings: RoutingSettings, around: Surroundings) -> Legs:
    return Legs(
        connector=around.connector,
        client=around.client,
        fleet=around.fleet,
        costs=behaviour.costs,
        limits=settings.legs,
        observer=around.observer,
        clock=around.clock,
    )

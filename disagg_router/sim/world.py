"""A simulated fleet and the product's router in front of it, for one run."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from disagg_router.config import AdmissionConfig, ConnectorConfig, HealthConfig
from disagg_router.connectors.nixl import NixlConnector
from disagg_router.cost.online import OnlineCosts
from disagg_router.cost.output import OutputHistory
from disagg_router.cost.priors import Priors
from disagg_router.errors import RequestError
from disagg_router.interfaces import CostModel, OutputPredictor, PathPolicy
from disagg_router.model import (
    Decision,
    Fingerprint,
    HandoffResult,
    InferenceRequest,
    Instance,
    InstanceId,
    InstanceState,
    PairState,
    Role,
    Slo,
    Target,
)
from disagg_router.policies.admission import KvAdmission
from disagg_router.policies.role_balance import LeanBalancer
from disagg_router.routing.fleet import Fleet, PairStatus, plan_pairs
from disagg_router.routing.holdings import GPU
from disagg_router.routing.legs import LegLimits
from disagg_router.routing.parts import Behaviour, RoutingParts, RoutingSettings, Surroundings, routing_parts
from disagg_router.routing.prefix_index import PrefixIndex
from disagg_router.sim.client import SimClient, tokens_of
from disagg_router.sim.instance import Handoffs, SimInstance
from disagg_router.sim.jobs import KvEvents, Standing
from disagg_router.sim.links import Links
from disagg_router.sim.loop import VirtualClock, VirtualLoop
from disagg_router.sim.model import FleetPlan, Workload, instance_ids
from disagg_router.sim.noise import NONE as NO_NOISE
from disagg_router.sim.noise import Delay, LateEvents, Noise, NoisyCosts, NoisyOutputs
from disagg_router.sim.profiles import Profile
from disagg_router.sim.scheduler import Room
from disagg_router.timing import LinkTiming
from disagg_router.view import ClusterView

INDEX_ENTRIES = 4_000_000
# What a cluster file without a word on it has.
_ADMISSION, _HEALTH = AdmissionConfig(), HealthConfig()
LEASE_S = ConnectorConfig().lease_s
FASTEST_LINK_BYTES_PER_S = 1e12  # stands for an ideal one in a prior


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a run depends on but its workload.

    `prior_factor`: the policy starts from prefill times that are wrong by it, and from decode and link times that are
    wrong by its inverse. `admission` off: nothing is refused, what finds no room waits for as long as it takes.
    """

    plan: FleetPlan
    profiles: Mapping[Role, Profile]
    slo: Slo
    admission: bool = True
    prior_factor: float = 2.0
    seed: int = 1
    noise: Noise = NO_NOISE


@dataclass(slots=True)
class Seen:
    """The router's observer: what it decided, by path and reason."""

    decisions: dict[str, int] = field(default_factory=dict)
    handoffs: dict[HandoffResult, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def decided(self, request: InferenceRequest, decision: Decision) -> None:
        name = f"{decision.path}/{decision.reason}"
        self.decisions[name] = self.decisions.get(name, 0) + 1

    def leg_failed(self, target: Target, error: RequestError) -> None:
        self.failures.append(f"{target.instance}: {error}")

    def handoff(self, result: HandoffResult) -> None:
        self.handoffs[result] = self.handoffs.get(result, 0) + 1


@dataclass(frozen=True, slots=True)
class Taps:
    """Where one may listen in: to what the router asks of its engines, to the KV events of each, to its decisions."""

    client: Callable[[Mapping[InstanceId, SimInstance], Workload, float], SimClient] = SimClient
    events: Callable[[Target, KvEvents], KvEvents] = lambda _, events: events
    seen: Callable[[], Seen] = Seen


SILENT = Taps()


class Counted:
    """A policy that would not ask for a prompt's length, with an admission that has to know it: who compares policies
    under one admission must not leave it blind for some of them."""

    needs_token_count = True

    def __init__(self, policy: PathPolicy) -> None:
        self._policy, self.soft_roles = policy, policy.soft_roles

    def decide(self, request: InferenceRequest, view: ClusterView) -> Decision:
        return self._policy.decide(request, view)


@dataclass(frozen=True, slots=True)
class World:
    parts: RoutingParts
    engines: Mapping[InstanceId, SimInstance]
    client: SimClient
    seen: Seen
    loop: VirtualLoop
    standing: Standing  # the driver's to keep
    dice: Sequence[random.Random]  # all that is left to chance from here on


def build(setup: Setup, workload: Workload, policy: PathPolicy, loop: VirtualLoop, taps: Taps = SILENT) -> World:
    """Inside the running loop."""
    rng, clock, seen = random.Random(setup.seed), VirtualClock(loop), taps.seen()
    fleet = fleet_of(setup.plan, workload.block_tokens, soft_roles=policy.soft_roles)
    links = Links(setup.plan.link_bytes_per_s, loop)
    index_of: list[PrefixIndex] = []  # the engines publish into it, and it is made after them

    def events(instance: Instance) -> KvEvents:
        published = _Published(Target(instance.id), lambda: index_of[0], workload.block_tokens)
        heard = taps.events(Target(instance.id), published)
        return LateEvents(heard, Delay(setup.noise.state_age_s, loop))

    dice = [random.Random(rng.getrandbits(64)) for _ in fleet.instances]
    engines = {
        instance.id: _engine(setup, instance, workload, links, own, events(instance))
        for instance, own in zip(fleet.instances.values(), dice, strict=True)
    }
    client = taps.client(engines, workload, setup.noise.state_age_s)
    around = Surroundings(
        fleet=lambda: fleet,
        client=client,
        connector=NixlConnector(kv_load_failure_policy="recompute", lease_s=LEASE_S),
        observer=seen,
        failed=seen.leg_failed,
        clock=clock,
        rng=rng,
    )
    noise = random.Random(f"noise {setup.seed}")  # apart, so that it changes nothing else of a run
    parts = routing(setup, len(workload.arrivals), policy, around, noise)
    index_of.append(parts.index)
    return World(parts, engines, client, seen, loop, Standing(), [rng, noise, *dice])


def routing(setup: Setup, requests: int, policy: PathPolicy, around: Surroundings, rng: random.Random) -> RoutingParts:
    """The product's router, as a simulation sets it up, in whatever surroundings. `rng` is of the noise."""
    profile = next(iter(setup.profiles.values()))
    costs: CostModel = OnlineCosts(_priors(setup, profile), lambda _: setup.plan.chunk_tokens)
    outputs: OutputPredictor = OutputHistory()
    if setup.noise.prefill_sd:
        costs = NoisyCosts(costs, setup.noise.prefill_sd, rng)
    if setup.noise.output_sd:
        outputs = NoisyOutputs(outputs, setup.noise.output_sd, rng)
    max_wait_s = _ADMISSION.max_wait_s if setup.admission else math.inf
    behaviour = Behaviour(
        policy=Counted(policy),
        admission=KvAdmission(max_wait_s=max_wait_s, reject_below=_ADMISSION.reject_below if setup.admission else None),
        balancer=LeanBalancer(setup.slo),
        costs=costs,
        outputs=outputs,
    )
    settings = RoutingSettings(
        legs=LegLimits(math.inf, math.inf, math.inf),
        max_gap_s=setup.slo.max_gap_s,
        queue=_ADMISSION.queue if setup.admission else requests,
        max_wait_s=max_wait_s,
        index_entries=INDEX_ENTRIES,
        look_s=_HEALTH.interval_s,
    )
    return routing_parts(behaviour, settings, around)


def fleet_of(plan: FleetPlan, block_tokens: int, *, soft_roles: bool) -> Fleet:
    """Everything is ready and every pair tested."""
    instances = {
        id_: Instance(
            id_,
            role,
            id_,
            InstanceState.READY,
            "1",
            engine_id=id_,
            fingerprint=Fingerprint(block_size=block_tokens),
            kv_events="simulated",
        )
        for id_, role in instance_ids(plan)
    }
    pairs = {pair: PairStatus(PairState.READY) for pair in plan_pairs(instances.values(), soft_roles=soft_roles)}
    return Fleet(instances, pairs, soft_roles)


def _engine(
    setup: Setup,
    instance: Instance,
    workload: Workload,
    links: Links,
    rng: random.Random,
    events: KvEvents,
) -> SimInstance:
    profile = setup.profiles[instance.role]
    return SimInstance(
        instance.id,
        timings=profile.timings,
        room=Room(setup.plan.chunk_tokens, profile.kv_capacity_tokens, workload.block_tokens),
        handoffs=Handoffs(profile.kv_bytes_per_token, profile.handoff_s, LEASE_S),
        links=links,
        events=events,
        loop=links.loop,
        rng=rng,
        noise_sd=profile.noise_sd,
    )


class _Published:
    """An engine's KV events, straight into the router's index."""

    def __init__(self, target: Target, index: Callable[[], PrefixIndex], block_tokens: int) -> None:
        self._target, self._index, self._block_tokens = target, index, block_tokens

    def stored(self, keys: Sequence[int], parent: int | None, blocks: Sequence[int]) -> None:
        tokens = tokens_of(blocks, self._block_tokens)
        self._index().stored(self._target, keys, parent, tokens, self._block_tokens, medium=GPU)

    def removed(self, keys: Sequence[int]) -> None:
        self._index().removed(self._target, keys)


def _priors(setup: Setup, profile: Profile) -> Priors:
    factor, true = setup.prior_factor, profile.prior
    timing = dataclasses.replace(
        true,
        prefill_a_s=true.prefill_a_s * factor,
        prefill_b_s=true.prefill_b_s * factor,
        prefill_c_s=true.prefill_c_s * factor,
        step_d_s=true.step_d_s / factor,
        step_e_s=true.step_e_s / factor,
        step_f_s=true.step_f_s / factor,
        chunk_tokens=setup.plan.chunk_tokens or true.chunk_tokens,
    )
    link_bytes_per_s = min(FASTEST_LINK_BYTES_PER_S, setup.plan.link_bytes_per_s) * factor
    handoff_s = max(0.001, profile.handoff_s) / factor
    return Priors(timing, LinkTiming(handoff_s, link_bytes_per_s), profile.kv_bytes_per_token)

"""A router over engines that do what the test says."""

from __future__ import annotations

import asyncio
import dataclasses
import random

from disagg_router.connectors.nixl import NixlConnector
from disagg_router.interfaces import EngineLoad
from disagg_router.model import InstanceId, PairState, Slo
from disagg_router.policies.admission import KvAdmission
from disagg_router.policies.override import PathOverride
from disagg_router.policies.registry import build_policy
from disagg_router.policies.role_balance import LeanBalancer
from disagg_router.routing.fleet import Fleet, PairStatus
from disagg_router.routing.legs import LegLimits
from disagg_router.routing.parts import Behaviour, RoutingSettings, Surroundings, routing_parts
from tests.builders import COSTS, instance, pair, request
from tests.fakes.client import FakeClient
from tests.fakes.clock import FakeClock
from tests.fakes.costs import FixedCosts

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 5}
LEASE_S = 30.0
ROOM = EngineLoad(running=0, waiting=0, kv_usage=0.0, kv_capacity_tokens=1000)
PATIENT = Slo(ttft_s=100.0, tpot_s=1.0, max_gap_s=10.0)


class Observer:
    def __init__(self):
        self.decisions, self.failures, self.handoffs = [], [], []

    def decided(self, request, decision):
        self.decisions.append((decision.path, decision.reason))

    def leg_failed(self, target, error):
        self.failures.append((target.instance, type(error).__name__))

    def handoff(self, result):
        self.handoffs.append(result)


class Outputs:
    """Expects 128 tokens of every answer."""

    def __init__(self):
        self.told = []

    def expect(self, max_output_tokens):
        return 128.0

    def observe(self, max_output_tokens, output_tokens):
        self.told.append((max_output_tokens, output_tokens))


class World:
    """A router over p0, p1, d0, d1, all four pairs tested."""

    def __init__(self, *names: str, policy="always_remote", tokens=100, waiting=64, connector=None, max_wait_s=30.0):
        names = names or ("p0", "p1", "d0", "d1")
        pairs = {pair(p, d): PairStatus(PairState.READY) for p in names for d in names if p[0] == "p" and d[0] == "d"}
        self.fleet = Fleet({InstanceId(name): instance(name, kv_events="tcp://e:1") for name in names}, pairs)
        self.client, self.clock, self.seen, self.suspected = FakeClient(tokens), FakeClock(), Observer(), []
        self.connector = connector or NixlConnector(kv_load_failure_policy="recompute", lease_s=LEASE_S)
        self.costs = FixedCosts(COSTS)
        self.outputs = Outputs()
        parts = routing_parts(
            Behaviour(
                policy=PathOverride(build_policy(policy, {})),
                admission=KvAdmission(max_wait_s=max_wait_s),
                balancer=LeanBalancer(PATIENT),
                costs=self.costs,
                outputs=self.outputs,
            ),
            RoutingSettings(
                legs=LegLimits(prefill_s=1, first_byte_s=2, unary_s=3),
                max_gap_s=0.5,
                queue=waiting,
                max_wait_s=max_wait_s,
                index_entries=1000,
                look_s=1.0,
            ),
            Surroundings(
                fleet=lambda: self.fleet,
                client=self.client,
                connector=self.connector,
                observer=self.seen,
                failed=self.failed,
                clock=self.clock,
                rng=random.Random(0),
            ),
        )
        self.router, self.loads, self.index = parts.router, parts.loads, parts.index

    def failed(self, target, error):
        self.seen.leg_failed(target, error)
        self.suspected.append(target.instance)

    async def ask(self, **changes):
        async with self.router.route(request(**changes), BODY) as routed:
            return routed.decision, await routed.response.read()

    async def hold(self):
        """A request that goes on until it is cancelled."""
        async with self.router.route(request(stream=True, slo=PATIENT), BODY):
            await asyncio.Event().wait()

    def change(self, name, **changes):
        instances = dict(self.fleet.instances)
        instances[InstanceId(name)] = dataclasses.replace(instances[InstanceId(name)], **changes)
        self.fleet = dataclasses.replace(self.fleet, instances=instances)

    def at_rest(self):
        return not self.loads.leases.held() and not self.client.open_now

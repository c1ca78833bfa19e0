"""The objects of one router process, put together."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import secrets
from dataclasses import dataclass

from fastapi import FastAPI

from disagg_router.config import ClusterConfig
from disagg_router.connectors.compatibility import same_arithmetic
from disagg_router.cost.online import OnlineCosts
from disagg_router.cost.output import OutputHistory
from disagg_router.engine_facts import chunk_tokens_of, priors_of
from disagg_router.engines.client import VllmClient
from disagg_router.engines.connection import UpstreamLimits
from disagg_router.engines.kv_events import follow_kv_events
from disagg_router.engines.selftest import self_test
from disagg_router.errors import NotUnderstood, UpstreamError
from disagg_router.interfaces import Clock, FleetSource, KVConnector, PairTest, PathPolicy
from disagg_router.model import Instance, Target
from disagg_router.observability.decisions import DecisionLog
from disagg_router.observability.gauges import Readings
from disagg_router.observability.metrics import Metrics
from disagg_router.observability.requests import RequestRecorder
from disagg_router.policies.admission import KvAdmission
from disagg_router.policies.role_balance import LeanBalancer
from disagg_router.proxy.admin import admin_app
from disagg_router.proxy.app import public_app
from disagg_router.proxy.openai import parse_call
from disagg_router.proxy.relay import RoutedEndpoint
from disagg_router.routing.brain import Brain
from disagg_router.routing.checked_tokenizer import CheckedTokenizer
from disagg_router.routing.clock import MonotonicClock
from disagg_router.routing.followers import Followers
from disagg_router.routing.gauging import Gauge
from disagg_router.routing.legs import LegLimits
from disagg_router.routing.model_folder import load_tokenizer, model_folder
from disagg_router.routing.parts import Behaviour, RoutingSettings, Surroundings, routing_parts
from disagg_router.routing.prompts import adapter_of
from disagg_router.routing.router import Router

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterParts:
    """Everything one router process runs. Build it inside a running event loop."""

    router: Router
    brain: Brain
    gauge: Gauge
    client: VllmClient
    decisions: DecisionLog | None
    public: FastAPI
    admin: FastAPI

    async def run(self) -> None:
        """What goes on beside the requests, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.brain.run())
            group.create_task(self.gauge.run())

    async def close(self) -> None:
        await self.client.close()
        if self.decisions is not None:
            await asyncio.to_thread(self.decisions.close)


def router_parts(
    config: ClusterConfig, *, connector: KVConnector, policy: PathPolicy, source: FleetSource
) -> RouterParts:
    """Raises ConfigError."""
    clock, limits, metrics = MonotonicClock(), config.limits, Metrics()
    client = VllmClient(
        UpstreamLimits(connect_s=limits.connect_s, first_byte_s=limits.first_byte_s, idle_s=limits.idle_s),
        health_s=config.router.health.timeout_s,
    )
    costs = OnlineCosts(
        priors_of(config), lambda target: chunk_tokens_of(config, brain.fleet.instances.get(target.instance))
    )
    tokenizer = _tokenizer(config, client, clock)
    parts = routing_parts(
        _behaviour(config, policy, costs),
        _settings(config),
        Surroundings(
            fleet=lambda: brain.fleet,
            client=client,
            connector=connector,
            observer=metrics,
            failed=lambda target, error: _failed(brain, metrics, target, error),
            clock=clock,
            rng=random.Random(),
        ),
        tokenizer=tokenizer,
        lora_of=lambda body: adapter_of(body, brain.adapters()),
    )
    brain = Brain(
        source,
        client,
        _pair_test(config, connector, client, clock),
        Followers(functools.partial(follow_kv_events, index=parts.index), parts.forget, clock),
        tokenizer,
        served_name=config.model.served_name,
        health=config.router.health,
        soft_roles=policy.soft_roles and connector.soft_roles,
        clock=clock,
    )
    decisions = DecisionLog(config.router.decision_log) if config.router.decision_log else None
    readings = Readings(
        queue_waiting=lambda: parts.queue.waiting,
        costs=lambda: costs.snapshot(clock.now_s()),
        load=parts.loads.of,
        leans=lambda: parts.views.leans,
        tokenizer=parts.prompts.counts,
        decision_log=decisions.counts if decisions else None,
    )
    metrics.watch(lambda: brain.fleet, parts.loads.leases, parts.index, readings)
    public, admin = _apps(config, parts.router, brain, metrics, decisions, readings, clock)
    return RouterParts(parts.router, brain, parts.gauge, client, decisions, public, admin)


def _behaviour(config: ClusterConfig, policy: PathPolicy, costs: OnlineCosts) -> Behaviour:
    admission = config.router.admission
    return Behaviour(
        policy=policy,
        admission=KvAdmission(max_wait_s=admission.max_wait_s, reject_below=admission.reject_below),
        balancer=LeanBalancer(config.slo()),
        costs=costs,
        outputs=OutputHistory(),
    )


def _settings(config: ClusterConfig) -> RoutingSettings:
    limits, admission = config.limits, config.router.admission
    return RoutingSettings(
        legs=LegLimits(limits.prefill_s, limits.first_byte_s, limits.unary_s),
        max_gap_s=config.slo().max_gap_s,
        queue=admission.queue,
        max_wait_s=admission.max_wait_s,
        index_entries=config.router.index_entries,
        look_s=config.router.health.interval_s,
    )


def _tokenizer(config: ClusterConfig, client: VllmClient, clock: Clock) -> CheckedTokenizer | None:
    """None where the model's files are not on this machine, or hold a tokenizer that only the engine understands."""
    model = config.model
    folder = model_folder(model.path, model.revision, os.environ) if model.path else None
    if folder is None:
        log.info("the model's files are not here: engines are asked for every prompt's tokens")
        return None
    try:
        return CheckedTokenizer(load_tokenizer(folder), client, served_name=model.served_name, clock=clock)
    except NotUnderstood as exc:
        log.info("engines are asked for every prompt's tokens: %s", exc)
        return None


def _failed(brain: Brain, metrics: Metrics, target: Target, error: UpstreamError) -> None:
    """Counted, and the instance is looked at."""
    metrics.leg_failed(target, error)
    brain.suspect(target.instance)


def _pair_test(config: ClusterConfig, connector: KVConnector, client: VllmClient, clock: Clock) -> PairTest:
    async def test_pair(prefill: Instance, decode: Instance) -> None:
        await self_test(
            client,
            connector,
            prefill,
            decode,
            served_name=config.model.served_name,
            salt=secrets.token_hex(8),  # nothing of an earlier test may be cached on either side
            exact=same_arithmetic(prefill.fingerprint, decode.fingerprint),
            clock=clock,
        )

    return test_pair


def _apps(
    config: ClusterConfig,
    router: Router,
    brain: Brain,
    metrics: Metrics,
    decisions: DecisionLog | None,
    readings: Readings,
    clock: Clock,
) -> tuple[FastAPI, FastAPI]:
    """The public and the admin application."""
    parse = functools.partial(
        parse_call,
        served_name=config.model.served_name,
        adapters=brain.adapters,
        slo=config.slo(),
        allow_path_override=config.router.allow_path_override,
    )
    endpoint = RoutedEndpoint(
        router,
        parse,
        RequestRecorder(metrics, decisions.add if decisions else None),
        body_limit_bytes=int(config.limits.body_mb * 2**20),
        body_idle_s=config.limits.idle_s,
        clock=clock,
    )
    public = public_app(endpoint, fleet=lambda: brain.fleet, draining=lambda: router.draining, models=brain.model_cards)
    token = config.router.admin_token
    return public, admin_app(router, parse, metrics, fleet=lambda: brain.fleet, token=token, readings=readings)

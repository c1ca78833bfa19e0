"""The only place where objects meet: config in, running parts out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import random
import secrets
import socket
from dataclasses import dataclass

from fastapi import FastAPI

from disagg_router.config import ClusterConfig, FleetConfig, StaticInstance
from disagg_router.connectors.compatibility import fingerprint_from_args, same_arithmetic
from disagg_router.connectors.registry import build_connector, connector_id
from disagg_router.controller.cluster import instance_specs
from disagg_router.controller.run import ControllerParts, run_controller
from disagg_router.controller.spec import build_command
from disagg_router.engines.client import VllmClient
from disagg_router.engines.connection import UpstreamLimits
from disagg_router.engines.kv_events import follow_kv_events
from disagg_router.engines.selftest import self_test
from disagg_router.errors import ConfigError, UpstreamError, UpstreamTimeout
from disagg_router.interfaces import Clock, FleetSource, KVConnector, PairTest, PathPolicy
from disagg_router.listening import Listener, listen
from disagg_router.model import EngineAddress, Fingerprint, Instance, InstanceSpec, Target
from disagg_router.observability.metrics import Metrics
from disagg_router.observability.requests import RequestRecorder
from disagg_router.policies.override import PathOverride
from disagg_router.policies.registry import build_policy
from disagg_router.proxy.admin import admin_app
from disagg_router.proxy.app import public_app
from disagg_router.proxy.openai import parse_call
from disagg_router.proxy.relay import RoutedEndpoint
from disagg_router.proxy.server import run_router
from disagg_router.routing.brain import Brain
from disagg_router.routing.clock import MonotonicClock
from disagg_router.routing.followers import Followers
from disagg_router.routing.leases import LeaseBook
from disagg_router.routing.legs import LegLimits, Legs
from disagg_router.routing.prefix_index import PrefixIndex
from disagg_router.routing.prompts import PromptReader
from disagg_router.routing.router import Router
from disagg_router.routing.sources import ControllerSource, FileSource, StaticSource


@dataclass(frozen=True, slots=True)
class RouterParts:
    """Everything one router process runs. Build it inside a running event loop."""

    router: Router
    brain: Brain
    client: VllmClient
    public: FastAPI
    admin: FastAPI


@dataclass(frozen=True, slots=True)
class Addresses:
    host: str
    port: int
    admin_host: str
    admin_port: int


def connector_of(config: ClusterConfig) -> KVConnector:
    """Raises ConfigError."""
    wanted = config.connector
    return build_connector(wanted.name, kv_load_failure_policy=wanted.kv_load_failure_policy, lease_s=wanted.lease_s)


def policy_of(config: ClusterConfig) -> PathPolicy:
    """Raises ConfigError."""
    policy = build_policy(config.router.policy.name, config.router.policy.options)
    return PathOverride(policy) if config.router.allow_path_override else policy


def fingerprint_of_spec(spec: InstanceSpec, connector: KVConnector) -> Fingerprint:
    return fingerprint_from_args(
        spec.args, spec.env, model=spec.model, revision=spec.revision, connector=connector_id(connector)
    )


def check_command(spec: InstanceSpec, connector: KVConnector) -> None:
    """Raises ConfigError when the spec's args or env name something that the controller decides."""
    build_command(spec, EngineAddress("127.0.0.1", 1, 2, 3, 4), "check", connector)


def run_controller_process(config: ClusterConfig, cluster: str, host: str, port: int) -> None:
    """The controller process, until a signal. Raises ConfigError, LaunchError."""
    # Ray takes most of a second to import, and only this process needs it.
    from disagg_router.controller.ray_launcher import RayLauncher  # noqa: PLC0415
    from disagg_router.controller.ray_session import RaySession  # noqa: PLC0415

    connector = connector_of(config)

    async def run() -> None:
        client = VllmClient(health_s=config.router.health.timeout_s)

        async def healthy(url: str) -> bool:
            with contextlib.suppress(UpstreamTimeout):
                return await client.healthy(url)
            return False

        build = functools.partial(build_command, connector=connector)
        parts = ControllerParts(
            connect=lambda cluster, count, settings: RayLauncher(RaySession.connect(cluster, count), build, settings),
            build=build,
            healthy=healthy,
            fingerprint=functools.partial(fingerprint_of_spec, connector=connector),
            clock=MonotonicClock(),
        )
        try:
            await run_controller(config, cluster, instance_specs(config, cluster), parts, host=host, port=port)
        finally:
            await client.close()

    asyncio.run(run())


def build_router(config: ClusterConfig, controller_url: str | None = None) -> RouterParts:
    """`controller_url` takes the place of the file's `fleet`. Raises ConfigError."""
    clock = MonotonicClock()
    connector, policy = connector_of(config), policy_of(config)
    limits = config.limits
    client = VllmClient(
        UpstreamLimits(connect_s=limits.connect_s, first_byte_s=limits.first_byte_s, idle_s=limits.idle_s),
        health_s=config.router.health.timeout_s,
    )
    index = PrefixIndex(config.router.index_entries)
    brain = Brain(
        fleet_source(config, controller_url, connector),
        client,
        _pair_test(config, connector, client, clock),
        Followers(functools.partial(follow_kv_events, index=index), index.forget, clock),
        served_name=config.model.served_name,
        health=config.router.health,
        clock=clock,
    )
    metrics, leases = Metrics(), LeaseBook()
    legs = Legs(
        connector=connector,
        client=client,
        fleet=lambda: brain.fleet,
        leases=leases,
        limits=LegLimits(limits.prefill_s, limits.first_byte_s, limits.unary_s),
        observer=metrics,
        clock=clock,
    )
    rng = random.Random()

    def failed(target: Target, error: UpstreamError) -> None:
        """Counted, and the instance is looked at."""
        metrics.leg_failed(target, error)
        brain.suspect(target.instance)

    prompts = PromptReader(client=client, fleet=lambda: brain.fleet, index=index, leases=leases, failed=failed, rng=rng)
    router = Router(
        policy=policy,
        legs=legs,
        leases=leases,
        prompts=prompts,
        fleet=lambda: brain.fleet,
        failed=failed,
        waiting_requests=config.router.admission.queue,
        observer=metrics,
        now_s=clock.now_s,
        rng=rng,
    )
    metrics.watch(lambda: brain.fleet, leases, index)
    public, admin = _apps(config, router, brain, metrics, clock)
    return RouterParts(router=router, brain=brain, client=client, public=public, admin=admin)


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
    config: ClusterConfig, router: Router, brain: Brain, metrics: Metrics, clock: Clock
) -> tuple[FastAPI, FastAPI]:
    """The public and the admin application."""
    parse = functools.partial(
        parse_call,
        served_name=config.model.served_name,
        slo=config.slo(),
        allow_path_override=config.router.allow_path_override,
    )
    endpoint = RoutedEndpoint(
        router,
        parse,
        RequestRecorder(metrics),
        body_limit_bytes=int(config.limits.body_mb * 2**20),
        body_idle_s=config.limits.idle_s,
        clock=clock,
    )
    public = public_app(endpoint, fleet=lambda: brain.fleet, draining=lambda: router.draining, models=brain.model_cards)
    return public, admin_app(router, parse, metrics, fleet=lambda: brain.fleet, token=config.router.admin_token)


def bind(config: ClusterConfig, at: Addresses) -> tuple[socket.socket, socket.socket]:
    """The public and the admin socket. Raises ConfigError."""
    if config.router.admin_token is None and not _is_loopback(at.admin_host):
        raise ConfigError(f"--admin-host {at.admin_host} is not loopback: set router.admin_token first")
    public = listen(at.host, at.port, "--port")
    try:
        return public, listen(at.admin_host, at.admin_port, "--admin-port")
    except ConfigError:
        public.close()
        raise


async def run_proxy(
    config: ClusterConfig, controller_url: str | None, sockets: tuple[socket.socket, socket.socket]
) -> None:
    """The router process, until a signal."""
    parts = build_router(config, controller_url)
    listeners = [Listener(parts.public, sockets[0]), Listener(parts.admin, sockets[1])]
    try:
        await run_router(parts.router, parts.brain.run(), listeners, drain_s=config.limits.drain_s)
    finally:
        await parts.client.close()


def fleet_source(config: ClusterConfig, controller_url: str | None, connector: KVConnector) -> FleetSource:
    """Raises ConfigError when two instances of the file's list share a url or an id."""

    def describe(entry: StaticInstance) -> Fingerprint:
        if entry.args is None and not config.engine.args:
            return Fingerprint()  # nobody said how it was started
        args = {**config.engine.args, **(entry.args or {})}
        return fingerprint_from_args(
            args,
            config.engine.env,
            model=config.model.path,
            revision=config.model.revision,
            connector=connector_id(connector),
        )

    clock = MonotonicClock()
    fleet = config.fleet or FleetConfig(controller=controller_url)
    if controller_url is not None or fleet.controller is not None:
        return ControllerSource(controller_url or str(fleet.controller), clock)
    if fleet.file is not None:
        return FileSource(fleet.file, describe, clock)
    try:
        return StaticSource(fleet.static or [], describe)
    except ValueError as exc:
        raise ConfigError(f"fleet.static: {exc}") from exc


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

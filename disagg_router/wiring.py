"""Where objects meet: config in, running parts out. Those of a router are put together in router_parts.py, those that
route requests in routing/parts.py."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from disagg_router.config import (
    ADMIN_TOKEN_VARIABLE,
    ClusterConfig,
    FleetConfig,
    KubernetesPods,
    KubernetesService,
    StaticInstance,
)
from disagg_router.connectors.compatibility import fingerprint_from_args
from disagg_router.connectors.registry import build_connector, connector_id
from disagg_router.controller.cluster import instance_specs
from disagg_router.controller.run import ControllerParts, run_controller
from disagg_router.controller.spec import build_command
from disagg_router.controller.state import NodeReport
from disagg_router.engines.client import VllmClient
from disagg_router.errors import ConfigError, UpstreamTimeout
from disagg_router.interfaces import FleetSource, KVConnector, PathPolicy
from disagg_router.listening import Listener, listen
from disagg_router.model import EngineAddress, Fingerprint, InstanceSpec
from disagg_router.policies.override import PathOverride
from disagg_router.policies.registry import build_policy
from disagg_router.proxy.server import run_router
from disagg_router.router_parts import RouterParts, router_parts
from disagg_router.routing.clock import MonotonicClock
from disagg_router.routing.kubernetes_api import KubernetesApi, find_access
from disagg_router.routing.kubernetes_source import KubernetesSource
from disagg_router.routing.sources import ControllerSource, FileSource, StaticSource


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
            connect=lambda cluster, count, settings: RayLauncher(
                RaySession.connect(cluster, count), build, settings, config.engine.placement_limit_s
            ),
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


def down_on_ray(cluster: str, folder: Path) -> Sequence[NodeReport]:
    """`down` on every node of the Ray that RAY_ADDRESS names. Raises ConfigError, LaunchError."""
    from disagg_router.controller.ray_down import down_on_nodes  # noqa: PLC0415 - as above

    return down_on_nodes(cluster, folder)


def build_router(config: ClusterConfig, controller_url: str | None = None) -> RouterParts:
    """`controller_url` takes the place of the file's `fleet`. Raises ConfigError."""
    connector = connector_of(config)
    source = fleet_source(config, controller_url, connector)
    if controller_url is None and config.fleet is not None and config.fleet.kubernetes is not None:
        find_access(config.fleet.kubernetes)  # not in fleet_source: check-config need not run in the cluster
    return router_parts(config, connector=connector, policy=policy_of(config), source=source)


def bind(config: ClusterConfig, at: Addresses) -> tuple[socket.socket, socket.socket]:
    """The public and the admin socket. Raises ConfigError."""
    if config.router.admin_token is None and not _is_loopback(at.admin_host):
        raise ConfigError(
            f"--admin-host {at.admin_host} is not loopback: set router.admin_token or {ADMIN_TOKEN_VARIABLE} first"
        )
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
        await run_router(parts.router, parts.run(), listeners, drain_s=config.limits.drain_s)
    finally:
        await parts.close()


def fleet_source(config: ClusterConfig, controller_url: str | None, connector: KVConnector) -> FleetSource:
    """Raises ConfigError when two instances of the file's list share a url or an id."""

    def describe(entry: StaticInstance | KubernetesPods | KubernetesService) -> Fingerprint:
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
    if (settings := fleet.kubernetes) is not None:
        return KubernetesSource(
            settings, lambda: KubernetesApi(find_access(settings)), describe, clock, random.Random()
        )
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

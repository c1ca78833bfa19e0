"""Connector names -> connectors. A third party adds one by the entry-point group `disagg_router.connectors`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from disagg_router.connectors.nixl import NixlConnector
from disagg_router.errors import ConfigError
from disagg_router.interfaces import KVConnector

ENTRY_POINTS = "disagg_router.connectors"
BUILT_IN: Mapping[str, Callable[..., KVConnector]] = MappingProxyType({NixlConnector.name: NixlConnector})


def build_connector(name: str, *, kv_load_failure_policy: str, lease_s: float) -> KVConnector:
    """Raises ConfigError for a name nobody registered."""
    maker = BUILT_IN.get(name) or _plug_in(name)
    if maker is None:
        known = sorted({*BUILT_IN, *entry_points(group=ENTRY_POINTS).names})
        raise ConfigError(f"connector.name {name!r} is not known: use one of {', '.join(known)}")
    connector: KVConnector = maker(kv_load_failure_policy=kv_load_failure_policy, lease_s=lease_s)
    return connector


def _plug_in(name: str) -> Callable[..., KVConnector] | None:
    """Looked for only when the name is none of ours: it goes through everything that is installed."""
    return next((point.load() for point in entry_points(group=ENTRY_POINTS, name=name)), None)


def connector_id(connector: KVConnector) -> str:
    """How a connector stands in a fingerprint: push and pull never meet."""
    return f"{connector.name}:{connector.direction}"

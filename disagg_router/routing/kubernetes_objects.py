"""What pods and EndpointSlices say about the servers in them. Pure; only the fields that are looked at are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

import msgspec

from disagg_router.listening import bracketed


class Condition(IntEnum):
    """In the order in which one of two that contradict each other is believed."""

    READY = 0
    UNREADY = 1
    TERMINATING = 2


@dataclass(frozen=True, slots=True)
class Server:
    """A port of a pod. `pod` is empty for an address without one, `incarnation` where nothing tells one start of the
    server from the next."""

    pod: str
    host: str
    port: int
    condition: Condition
    incarnation: str = ""

    @property
    def address(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    uid: str = ""
    deletion_timestamp: str | None = None


class _PodCondition(msgspec.Struct, frozen=True):
    type: str
    status: str


class _ContainerStatus(msgspec.Struct, frozen=True, rename="camel"):
    restart_count: int = 0


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: tuple[_PodCondition, ...] | None = None
    container_statuses: tuple[_ContainerStatus, ...] | None = None


class Pod(msgspec.Struct, frozen=True):
    metadata: Meta
    status: _PodStatus = _PodStatus()


class _EndpointConditions(msgspec.Struct, frozen=True):
    """None is to be read as true for the first two, as false for the last."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _TargetRef(msgspec.Struct, frozen=True):
    kind: str = ""
    name: str = ""


class _Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: tuple[str, ...]
    conditions: _EndpointConditions = _EndpointConditions()
    target_ref: _TargetRef | None = None


class _Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class Slice(msgspec.Struct, frozen=True, rename="camel"):
    metadata: Meta
    address_type: str = "IPv4"
    endpoints: tuple[_Endpoint, ...] | None = None
    ports: tuple[_Port, ...] | None = None


def of_pods(pods: Iterable[Pod], port: int) -> list[Server]:
    """Those with an address. A container that was restarted in its pod makes another incarnation."""
    return [
        Server(pod.metadata.name, pod.status.pod_ip, port, _pod_condition(pod), _incarnation(pod))
        for pod in pods
        if pod.status.pod_ip
    ]


def of_slices(slices: Iterable[Slice], port: int | str) -> list[Server]:
    """One per pod. The same pod may be in several slices: while it moves from one to another, and with each of its
    address families; IPv4 comes first.

    No incarnation: a slice knows the pod, but not whether its container was restarted.
    """
    found: dict[str, Server] = {}
    for slice_ in sorted(slices, key=lambda one: (one.address_type != "IPv4", one.metadata.name)):
        number = _number(slice_, port)
        for endpoint in (slice_.endpoints or ()) if number else ():
            pod = endpoint.target_ref.name if endpoint.target_ref and endpoint.target_ref.kind == "Pod" else ""
            # Kubernetes lets every address of an endpoint stand for the same server, and writes one.
            server = Server(pod, endpoint.addresses[0], number, _endpoint_condition(endpoint.conditions))
            known = found.setdefault(pod or server.address, server)
            if server.condition > known.condition:
                found[pod or server.address] = replace(known, condition=server.condition)
    return list(found.values())


def _number(slice_: Slice, port: int | str) -> int:
    """The port's number in this slice; 0 when it has none of that name."""
    if isinstance(port, int):
        return port
    return next((one.port or 0 for one in slice_.ports or () if one.name == port), 0)


def _pod_condition(pod: Pod) -> Condition:
    if pod.metadata.deletion_timestamp:
        return Condition.TERMINATING
    ready = any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())
    return Condition.READY if ready else Condition.UNREADY


def _endpoint_condition(conditions: _EndpointConditions) -> Condition:
    if conditions.terminating:
        return Condition.TERMINATING
    # A Service that publishes unready addresses calls all of them ready; `serving` tells of those too.
    unready = conditions.ready is False or conditions.serving is False
    return Condition.UNREADY if unready else Condition.READY


def _incarnation(pod: Pod) -> str:
    return f"{pod.metadata.uid}/{sum(one.restart_count for one in pod.status.container_statuses or ())}"

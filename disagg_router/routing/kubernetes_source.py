"""The fleet as Kubernetes tells it: pods by label, and the pods behind Services."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from disagg_router.config import KubernetesConfig, KubernetesPods, KubernetesService
from disagg_router.interfaces import Clock
from disagg_router.model import Fingerprint, FleetSnapshot, Instance, InstanceId, InstanceState
from disagg_router.routing.kubernetes_api import GONE, ApiError, Kind, KubernetesApi, Listed
from disagg_router.routing.kubernetes_objects import Condition, Pod, Server, Slice, of_pods, of_slices

log = logging.getLogger(__name__)

STEADY_S = 5.0  # a watch that lasted so long forgives earlier failures

PODS = Kind("/api/v1", "pods", Pod)
SLICES = Kind("/apis/discovery.k8s.io/v1", "endpointslices", Slice)

Entry = KubernetesPods | KubernetesService
T = TypeVar("T", Pod, Slice)


class KubernetesSource:
    """Lists, then watches, and lists again whenever a watch ends and every `resync_s`. While the API server is away the
    last fleet stays in force: the router's own probes still tell which engines answer."""

    def __init__(
        self,
        settings: KubernetesConfig,
        connect: Callable[[], KubernetesApi],
        describe: Callable[[Entry], Fingerprint],
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """`connect` is called when the watching begins."""
        self._settings, self._connect, self._clock, self._rng = settings, connect, clock, rng
        entries: list[Entry] = [*settings.services, *settings.pods]
        self._entries = [(entry, describe(entry)) for entry in entries]

    async def watch(self) -> AsyncGenerator[FleetSnapshot, None]:
        changed, fleet = asyncio.Event(), _Fleet()
        api = self._connect()
        followers = [self._follower(entry, api, changed.set) for entry, _ in self._entries]
        tasks = [asyncio.create_task(follower.run()) for follower in followers]
        try:
            while True:
                await _until(changed, tasks)
                changed.clear()
                heard = [
                    _Heard(follower.servers(), entry, fingerprint)
                    for follower, (entry, fingerprint) in zip(followers, self._entries, strict=True)
                ]
                if fleet.replace(heard):
                    yield fleet.snapshot
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _follower(
        self, entry: Entry, api: KubernetesApi, changed: Callable[[], None]
    ) -> _Follower[Pod] | _Follower[Slice]:
        timing = _Timing(self._settings.resync_s, self._clock, self._rng)
        if isinstance(entry, KubernetesPods):
            return _Follower(PODS, entry.selector, lambda pods: of_pods(pods, entry.port), api, changed, timing)
        selector = f"kubernetes.io/service-name={entry.name}"
        return _Follower(SLICES, selector, lambda slices: of_slices(slices, entry.port), api, changed, timing)


async def _until(changed: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Also until one of the tasks ends, which they do only by a fault: it is raised here."""
    waiting = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    for task in tasks:
        if task.done():
            task.result()


# --- following ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Timing:
    resync_s: float
    clock: Clock
    rng: random.Random

    def backoff_s(self, failures: int) -> float:
        return 0.2 * 2.0 ** min(failures, 7) * (0.5 + self.rng.random() / 2)


class _Follower(Generic[T]):
    """The objects of one entry, as they were last told."""

    def __init__(
        self,
        kind: Kind[T],
        selector: str,
        servers_of: Callable[[Collection[T]], list[Server]],
        api: KubernetesApi,
        changed: Callable[[], None],
        timing: _Timing,
    ) -> None:
        self._kind: Kind[T] = kind
        self._servers_of: Callable[[Collection[T]], list[Server]] = servers_of
        self._selector = selector
        self._api, self._changed, self._timing = api, changed, timing
        self._objects: dict[str, T] = {}
        self._away = False
        self._empty = False

    def servers(self) -> list[Server]:
        return self._servers_of(self._objects.values())

    async def run(self) -> None:
        clock, failures = self._timing.clock, 0
        while True:
            began_s = clock.now_s()
            try:
                await self._list_then_watch()
            except ApiError as exc:
                self._complain(exc)
            failures = 0 if clock.now_s() - began_s >= STEADY_S else failures + 1
            await clock.sleep(self._timing.backoff_s(failures))

    async def _list_then_watch(self) -> None:
        """At most for `resync_s`: then it is time for another list, in case a change was missed. Raises ApiError."""
        listed = False
        try:
            async with asyncio.timeout(self._timing.resync_s):
                async with aclosing(self._api.list_then_watch(self._kind, self._selector)) as told:
                    async for one in told:
                        if isinstance(one, Listed):
                            self._objects = {item.metadata.name: item for item in one.items}
                            listed = True
                            self._answered()
                        elif one.gone:
                            self._objects.pop(one.item.metadata.name, None)
                        else:
                            self._objects[one.item.metadata.name] = one.item
                        self._changed()
        except TimeoutError as exc:
            if not listed:
                raise ApiError(f"the API server did not answer within {self._timing.resync_s:g} s") from exc

    def _answered(self) -> None:
        where = self._name, self._api.namespace
        if self._away:
            log.info("the API server tells of %s again", self._name)
        self._away = False
        if not self._empty and not self.servers():
            log.warning("no server is known by %s in namespace %s: if it has pods, see the name and the port", *where)
        self._empty = not self.servers()

    def _complain(self, exc: ApiError) -> None:
        if exc.status != GONE and not self._away:
            log.warning("%s; what is known of %s stays in force", exc, self._name)
            self._away = True

    @property
    def _name(self) -> str:
        return f"{self._kind.plural} {self._selector}"


# --- putting together ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Heard:
    servers: list[Server]
    entry: Entry
    fingerprint: Fingerprint


class _Fleet:
    """The snapshot that all entries make together."""

    def __init__(self) -> None:
        self.snapshot = FleetSnapshot(0, ())

    def replace(self, heard: Sequence[_Heard]) -> bool:
        """Whether there is anything new. A server that two entries name belongs to the first; two of one pod have
        their ports in their ids."""
        before = {instance.id for instance in self.snapshot.instances}
        found: dict[InstanceId, Instance] = {}
        urls: set[str] = set()
        for one in heard:
            for server in sorted(one.servers, key=lambda server: (server.pod, server.address)):
                url = f"http://{server.address}"
                id_ = InstanceId(server.pod or server.address)
                if id_ in found:
                    id_ = InstanceId(f"{id_}:{server.port}")
                # One that takes nothing new is told of only to those who know it: for the end of what it has.
                if url in urls or id_ in found or (server.condition is not Condition.READY and id_ not in before):
                    continue
                urls.add(url)
                found[id_] = _instance(id_, url, server, one)
        instances = tuple(found[id_] for id_ in sorted(found))
        if self.snapshot.version and instances == self.snapshot.instances:
            return False
        self.snapshot = FleetSnapshot(self.snapshot.version + 1, instances)
        return True


def _instance(id_: InstanceId, url: str, server: Server, heard: _Heard) -> Instance:
    return Instance(
        id=id_,
        role=heard.entry.role,
        url=url,
        state=InstanceState.STARTING if server.condition is Condition.READY else InstanceState.DRAINING,
        incarnation=server.incarnation,
        fingerprint=heard.fingerprint,
    )

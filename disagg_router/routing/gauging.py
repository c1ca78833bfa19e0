"""Looks at every engine's load now and then, and keeps the clocks of the books and of the role balance going."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from disagg_router.errors import UpstreamError
from disagg_router.interfaces import Clock, CostModel, EngineClient, EngineLoad, RoleBalancer
from disagg_router.model import Instance, InstanceId, Target
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.loads import Loads
from disagg_router.routing.queue import FairQueue
from disagg_router.routing.views import Views

log = logging.getLogger(__name__)

TICK_S = 0.25
BALANCE_TICKS = 4
LOOKS_AT_ONCE = 8


class Gauge:
    """Follows the published fleet. What is not there any more, or is another process, is forgotten."""

    def __init__(
        self,
        *,
        fleet: Callable[[], Fleet],
        client: EngineClient,
        loads: Loads,
        costs: CostModel,
        views: Views,
        balancer: RoleBalancer,
        queue: FairQueue,
        interval_s: float,
        clock: Clock,
    ) -> None:
        self._fleet, self._client, self._loads, self._costs = fleet, client, loads, costs
        self._views, self._balancer, self._queue = views, balancer, queue
        self._interval_s, self._clock = interval_s, clock
        self._known: dict[InstanceId, tuple[str, tuple[Target, ...]]] = {}  # incarnation, and a target per rank
        self._pulled: dict[InstanceId, tuple[float, float]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_looking())
            group.create_task(self._keep_ticking())

    async def _keep_ticking(self) -> None:
        ticks = 0
        while True:
            await self._clock.sleep(TICK_S)
            self._loads.tick()
            ticks += 1
            if ticks % BALANCE_TICKS == 0:
                self._views.leans = self._balancer.step(self._views.now(self._clock.now_s()), self._views.leans)

    async def _keep_looking(self) -> None:
        while True:
            ready = self._fleet().ready()
            self._adopt(ready)
            slots = asyncio.Semaphore(LOOKS_AT_ONCE)
            await asyncio.gather(*(self._look(instance, slots) for instance in ready))
            self._queue.poke()
            await self._clock.sleep(self._interval_s)

    def _adopt(self, ready: list[Instance]) -> None:
        now = {instance.id: (instance.incarnation, instance.targets) for instance in ready}
        for id_, (incarnation, targets) in list(self._known.items()):
            if now.get(id_) != (incarnation, targets):
                del self._known[id_]
                self._pulled.pop(id_, None)
                for target in targets:
                    self._loads.forget(target)
                    self._costs.forget(target)
        for instance in ready:
            if instance.id not in self._known:
                for target in instance.targets:
                    self._loads.sized(target, instance.rank_capacity_tokens)
        self._known |= now

    async def _look(self, instance: Instance, slots: asyncio.Semaphore) -> None:
        """One that does not tell keeps what was known of it: the health probes say whether it is there at all."""
        async with slots:
            try:
                load = await self._client.load(instance.url)
            except UpstreamError as exc:
                log.debug("%s does not tell its load: %s", instance.id, exc)
                return
            except Exception:
                # One engine that answers in a way nobody foresaw must not end the looks at all the others.
                log.exception("%s could not be asked for its load", instance.id)
                return
        if self._known.get(instance.id) != (instance.incarnation, instance.targets):
            return  # another one by now
        for target in instance.targets:
            self._loads.reconcile(target, _share(load, instance.dp_size))
        before = self._pulled.get(instance.id)
        self._pulled[instance.id] = load.pulled_bytes, load.pull_s
        if before is not None and load.pulled_bytes > before[0] and load.pull_s > before[1]:
            moved_bytes, seconds = load.pulled_bytes - before[0], load.pull_s - before[1]
            self._costs.transferred(instance.id, moved_bytes, seconds, self._clock.now_s())


def _share(load: EngineLoad, ranks: int) -> EngineLoad:
    """Of one rank: the server's metrics are summed over them, and it deals its requests out evenly."""
    if ranks == 1:
        return load
    capacity_tokens = load.kv_capacity_tokens
    return EngineLoad(
        running=round(load.running / ranks),
        waiting=round(load.waiting / ranks),
        kv_usage=load.kv_usage,
        kv_capacity_tokens=None if capacity_tokens is None else capacity_tokens // ranks,
    )

"""Keeps the published fleet true: follows the fleet source, probes every instance, has the pairs tested."""

from __future__ import annotations

import asyncio
import logging

from disagg_router.config import HealthConfig
from disagg_router.interfaces import Clock, EngineClient, FleetSource, JsonObject, PairTest
from disagg_router.model import FleetSnapshot, InstanceId
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.followers import Followers
from disagg_router.routing.pairs import PairTester
from disagg_router.routing.watch import InstanceWatch

log = logging.getLogger(__name__)


class Brain:
    """`fleet` is replaced, never changed: whoever read it keeps a consistent picture."""

    def __init__(
        self,
        source: FleetSource,
        client: EngineClient,
        test_pair: PairTest,
        followers: Followers,
        *,
        served_name: str,
        health: HealthConfig,
        clock: Clock,
    ) -> None:
        self._source, self._client, self._followers = source, client, followers
        self._group: asyncio.TaskGroup | None = None  # while it runs
        self._served_name, self._health, self._clock = served_name, health, clock
        self._watches: dict[InstanceId, InstanceWatch] = {}
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}
        self._pairs = PairTester(
            test_pair,
            retest_s=health.pair_retest_s,
            limit_s=health.pair_test_limit_s,
            clock=clock,
            changed=self._publish,
        )
        self.fleet = Fleet()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._pairs.run())
            async for snapshot in self._source.watch():
                self._adopt(snapshot, group)

    def model_cards(self) -> list[JsonObject]:
        """The served model as an engine shows it under /v1/models; its bare name while none is up."""
        cards = [card for watch in self._watches.values() for card in watch.model_cards]
        ours = [card for card in cards if card.get("id") == self._served_name]
        return ours[:1] or [{"id": self._served_name, "object": "model", "owned_by": "vllm"}]

    def suspect(self, instance: InstanceId) -> None:
        """A request has just failed there: look at once instead of at the next interval."""
        if watch := self._watches.get(instance):
            watch.poke()

    def _adopt(self, snapshot: FleetSnapshot, group: asyncio.TaskGroup) -> None:
        declared = {instance.id: instance for instance in snapshot.instances}
        for gone in self._watches.keys() - declared.keys():
            log.info("%s has left the fleet", gone)
            del self._watches[gone]
            self._tasks.pop(gone).cancel()
        for id_, instance in declared.items():
            if id_ in self._watches:
                self._watches[id_].declare(instance)
                continue
            watch = InstanceWatch(
                instance,
                client=self._client,
                served_name=self._served_name,
                interval_s=self._health.interval_s,
                clock=self._clock,
                changed=self._instances_changed,
            )
            self._watches[id_] = watch
            self._tasks[id_] = group.create_task(watch.run())
        self._instances_changed()

    def _instances_changed(self) -> None:
        seen = {id_: watch.seen for id_, watch in self._watches.items()}
        self._pairs.update(seen)
        if self._group is not None:
            self._followers.update(seen, self._group)
        self._publish()

    def _publish(self) -> None:
        instances = {id_: watch.seen for id_, watch in self._watches.items()}
        self.fleet = Fleet(instances, self._pairs.statuses())

"""Keeps the published fleet true: follows the fleet source, probes every instance, has the pairs tested."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

from disagg_router.config import HealthConfig
from disagg_router.interfaces import Clock, EngineClient, FleetSource, JsonObject, PairTest
from disagg_router.model import FleetSnapshot, InstanceId, InstanceState
from disagg_router.routing.checked_tokenizer import CheckedTokenizer
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
        tokenizer: CheckedTokenizer | None = None,
        *,
        served_name: str,
        health: HealthConfig,
        soft_roles: bool,
        clock: Clock,
    ) -> None:
        self._source, self._client, self._followers, self._tokenizer = source, client, followers, tokenizer
        self._group: asyncio.TaskGroup | None = None  # while it runs
        self._served_name, self._health, self._clock = served_name, health, clock
        self._watches: dict[InstanceId, InstanceWatch] = {}
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}
        self._pairs = PairTester(
            test_pair,
            retest_s=health.pair_retest_s,
            limit_s=health.pair_test_limit_s,
            soft_roles=soft_roles,
            clock=clock,
            changed=self._publish,
        )
        self._soft_roles = soft_roles
        self._cards: Mapping[str, JsonObject] = {}
        self._adapters: frozenset[str] = frozenset()
        self.fleet = Fleet(soft_roles=soft_roles)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._pairs.run())
            async for snapshot in self._source.watch():
                self._adopt(snapshot, group)

    def model_cards(self) -> list[JsonObject]:
        """The served model and its adapters as an engine shows them under /v1/models; a bare name while none is up."""
        return list(self._cards.values()) or [{"id": self._served_name, "object": "model", "owned_by": "vllm"}]

    def adapters(self) -> Collection[str]:
        """LoRA adapters that every ready engine serves: any of them may be chosen."""
        return self._adapters

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
            if self._tokenizer is not None:
                self._tokenizer.update(seen, self._group)
        self._publish()

    def _learn_models(self) -> None:
        """An adapter's card names the served model as its parent."""
        ready = [w.model_cards for w in self._watches.values() if w.seen.state is InstanceState.READY]
        names = [{str(card.get("id")) for card in cards if card.get("parent")} for cards in ready]
        self._adapters = frozenset(set.intersection(*names)) if names else frozenset()
        wanted = {self._served_name, *self._adapters}
        self._cards = {str(card["id"]): card for cards in ready for card in cards if card.get("id") in wanted}

    def _publish(self) -> None:
        self._learn_models()
        instances = {id_: watch.seen for id_, watch in self._watches.items()}
        self.fleet = Fleet(instances, self._pairs.statuses(), self._soft_roles)

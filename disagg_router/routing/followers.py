"""Keeps one follower of KV events per running instance, so that the prefix index knows what each of them holds, and
has what is known of an instance forgotten when it is another process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from disagg_router.interfaces import Clock, FollowEvents
from disagg_router.model import Instance, InstanceId, InstanceState, Target

log = logging.getLogger(__name__)

RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Follower:
    """An incarnation that misses a probe goes on being followed: its events go on too. One without events is only
    remembered."""

    instance: Instance
    task: asyncio.Task[None] | None

    def is_over(self, now: Instance | None) -> bool:
        if now is None or now.state is InstanceState.FAILED:
            return True
        # While it is away nobody knows its incarnation: it may be the same when it is back.
        away = now.state is not InstanceState.READY
        return not away and _identity(now) != _identity(self.instance)


class Followers:
    """`forget` makes the indexes drop a target: one that left the fleet, or is another process now. It is called for
    every data-parallel rank of an instance."""

    def __init__(self, follow: FollowEvents, forget: Callable[[Target], None], clock: Clock) -> None:
        self._follow, self._forget, self._clock = follow, forget, clock
        self._followers: dict[InstanceId, _Follower] = {}

    def update(self, instances: Mapping[InstanceId, Instance], group: asyncio.TaskGroup) -> None:
        for id_, follower in list(self._followers.items()):
            if follower.is_over(instances.get(id_)):
                if follower.task is not None:
                    follower.task.cancel()
                del self._followers[id_]
                self._forget_ranks(follower.instance)
        for id_, instance in instances.items():
            if instance.state is InstanceState.READY and id_ not in self._followers:
                task = group.create_task(self._keep_following(instance)) if instance.kv_events else None
                self._followers[id_] = _Follower(instance, task)

    async def _keep_following(self, instance: Instance) -> None:
        while True:
            try:
                await self._follow(instance)
            except Exception:
                # Without its events an instance is only taken for empty; it must not end the router.
                log.exception("the KV events of %s cannot be followed; trying again in %g s", instance.id, RETRY_S)
            self._forget_ranks(instance)
            await self._clock.sleep(RETRY_S)

    def _forget_ranks(self, instance: Instance) -> None:
        for target in instance.targets:
            self._forget(target)


def _identity(instance: Instance) -> tuple[str, str | None, int]:
    return instance.incarnation, instance.kv_events, instance.dp_size

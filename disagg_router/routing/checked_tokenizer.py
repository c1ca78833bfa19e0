"""The local tokenizer, used only as far as its ids were seen to be the engine's own."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from disagg_router.errors import UpstreamError, UpstreamRefused
from disagg_router.interfaces import Clock, EngineClient
from disagg_router.model import Body, Instance, InstanceId, InstanceState
from disagg_router.routing.local_tokenizer import LocalTokenizer, Prompt
from disagg_router.routing.request_shapes import request_shapes

log = logging.getLogger(__name__)

RETRY_S = 10.0


class Kind(StrEnum):
    """The two ways a prompt is made, each checked for itself; a metric label."""

    COMPLETION = "completion"
    CHAT = "chat"


class CheckedTokenizer:
    """Compares `tokenizer` with the first engine it sees, and anew with another one when that process is gone.

    A kind is trusted once every shape that both could read gave the same ids, and at least one did; a mismatch ends
    the trust until an engine passes. While a later check runs the last verdict holds: the files are the same.
    """

    def __init__(self, tokenizer: LocalTokenizer, client: EngineClient, *, served_name: str, clock: Clock) -> None:
        self.tokenizer = tokenizer
        self._client, self._served_name, self._clock = client, served_name, clock
        self._checked: tuple[InstanceId, str] | None = None
        self._task: asyncio.Task[None] | None = None
        self._trusted: frozenset[Kind] = frozenset()
        self.mismatches: Counter[Kind] = Counter()
        self.failed_checks = 0

    def update(self, instances: Mapping[InstanceId, Instance], group: asyncio.TaskGroup) -> None:
        """To be called whenever an instance has changed; the check runs in `group`."""
        seen = {(i.id, i.incarnation): i for i in instances.values() if i.state is InstanceState.READY}
        if self._checked in seen or not seen:
            return
        if self._task is not None:
            self._task.cancel()
        self._checked, instance = next(iter(seen.items()))
        self._task = group.create_task(self._check(instance))

    def trusts(self, kind: Kind) -> bool:
        return kind in self._trusted

    async def prompt(self, body: Body) -> Prompt | None:
        """None where the engine has to be asked. Token ids that the client gives need no trust."""
        kind = Kind.CHAT if "messages" in body else Kind.COMPLETION
        if kind is Kind.CHAT and kind not in self._trusted:
            return None
        prompt = await self.tokenizer.prompt(body)
        return None if prompt is None or (prompt.text is not None and kind not in self._trusted) else prompt

    async def _check(self, instance: Instance) -> None:
        first = True
        while True:
            try:
                self._trusted = await self._compare(instance)
            except Exception as exc:  # whatever it is, an engine can be asked instead; it must not end the router
                self.failed_checks += 1
                expected = isinstance(exc, UpstreamError)
                if first:
                    log.warning("our tokenizer could not be compared with %s's", instance.id, exc_info=not expected)
                first = False
                await self._clock.sleep(RETRY_S)
            else:
                return

    async def _compare(self, instance: Instance) -> frozenset[Kind]:
        """Raises UpstreamError when the engine does not answer."""
        same: Counter[Kind] = Counter()
        differ: dict[Kind, str] = {}
        for name, shape in request_shapes(self._served_name).items():
            kind = Kind.CHAT if "messages" in shape else Kind.COMPLETION
            if kind in differ:
                continue
            verdict = await self._same(instance, shape)
            if verdict is False:
                differ[kind] = name
            same[kind] += bool(verdict)
        for kind, name in differ.items():
            self.mismatches[kind] += 1
            log.warning(
                "%s makes other token ids of a %s request (%s) than our tokenizer: it is asked for those of each",
                instance.id,
                kind,
                name,
            )
        return frozenset(kind for kind in Kind if same[kind] and kind not in differ)

    async def _same(self, instance: Instance, shape: Mapping[str, Any]) -> bool | None:
        """None when one of the two does not read such requests at all."""
        prompt = await self.tokenizer.prompt(shape)
        if prompt is None:
            return None
        try:
            theirs = await self._client.tokenize(instance.url, shape)
        except UpstreamRefused:
            return None
        return list(await self.tokenizer.ids(prompt)) == list(theirs)

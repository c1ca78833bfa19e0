"""Where the fleet comes from: a controller, a list in the config, or a file that is read again when it changes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from disagg_router.config import StaticInstance
from disagg_router.errors import ConfigError
from disagg_router.interfaces import Clock
from disagg_router.model import Fingerprint, FleetSnapshot, Instance, InstanceId, InstanceState

log = logging.getLogger(__name__)

LONG_POLL_S = 25.0  # the controller answers at least this often
FILE_POLL_S = 1.0
PATIENCE = 6  # failed polls, about 10 s, before they are worth a line

Describe = Callable[[StaticInstance], Fingerprint]


class ControllerSource:
    """Long-polls `GET /fleet?after=VERSION`. A controller that is away leaves the last snapshot in force: the
    router's own probes still tell which engines answer."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._url, self._clock = url, clock

    async def watch(self) -> AsyncGenerator[FleetSnapshot, None]:
        timeout = httpx.Timeout(5, read=LONG_POLL_S + 10)
        async with httpx.AsyncClient(base_url=self._url, timeout=timeout, trust_env=False) as http:
            seen: FleetSnapshot | None = None
            failures = 0
            while True:
                try:
                    answer = await http.get("/fleet", params={"after": seen.version} if seen else None)
                    answer.raise_for_status()
                    snapshot = msgspec.json.decode(answer.content, type=FleetSnapshot)
                except (httpx.HTTPError, msgspec.MsgspecError) as exc:
                    failures += 1
                    if (
                        failures == PATIENCE
                    ):  # a router that is started first waits for its controller as a matter of course
                        log.warning("the controller at %s does not answer: %s", self._url, type(exc).__name__)
                    # Whole snapshot next time: a controller that was restarted counts from 0 again.
                    seen = None
                    await self._clock.sleep(0.2 * 2 ** min(failures, 5) * (0.5 + random.random() / 2))
                    continue
                failures = 0
                if snapshot != seen:
                    seen = snapshot
                    yield snapshot


class StaticSource:
    """The list in the config, once."""

    def __init__(self, instances: list[StaticInstance], describe: Describe) -> None:
        self._snapshot = FleetSnapshot(1, _declared(instances, describe))

    async def watch(self) -> AsyncGenerator[FleetSnapshot, None]:
        yield self._snapshot
        await asyncio.Event().wait()  # nothing will ever change; the watcher cancels us


class _FleetFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    instances: list[StaticInstance] = Field(default_factory=list)


class FileSource:
    """A YAML or JSON file `{instances: [{url, role, ...}]}`, read again when its bytes change.

    A file that is missing or wrong keeps the last good fleet: an editor's half-written file must not empty it.
    """

    def __init__(self, path: str, describe: Describe, clock: Clock) -> None:
        self._path, self._describe, self._clock = Path(path), describe, clock

    async def watch(self) -> AsyncGenerator[FleetSnapshot, None]:
        digest, version = b"", 0
        while True:
            try:
                content = await asyncio.to_thread(self._path.read_bytes)
            except OSError as exc:
                log.warning("fleet.file %s cannot be read: %s", self._path, exc.strerror)
                content = None
            if content is not None and (new := hashlib.sha256(content).digest()) != digest:
                digest = new
                if (instances := self._parse(content)) is not None:
                    version += 1
                    yield FleetSnapshot(version, instances)
            await self._clock.sleep(FILE_POLL_S)

    def _parse(self, content: bytes) -> tuple[Instance, ...] | None:
        try:
            data: Any = yaml.safe_load(content)
            return _declared(_FleetFile.model_validate(data).instances, self._describe)
        except (yaml.YAMLError, ValidationError, ValueError, ConfigError) as exc:
            first = exc.errors()[0]["msg"] if isinstance(exc, ValidationError) else " ".join(str(exc).split())
            log.warning("fleet.file %s is wrong, the last good fleet stays: %s", self._path, first)
            return None


def _declared(instances: list[StaticInstance], describe: Describe) -> tuple[Instance, ...]:
    """Raises ValueError when two instances share a url or an id."""
    declared = tuple(
        Instance(
            id=InstanceId(entry.id or entry.url.split("://", 1)[1]),
            role=entry.role,
            url=entry.url,
            state=InstanceState.STARTING,
            incarnation="",  # the engine tells, or its absences do
            fingerprint=describe(entry),
        )
        for entry in instances
    )
    named: dict[str, list[str]] = {"id": [i.id for i in declared], "url": [i.url for i in declared]}
    for what, values in named.items():
        for value in values:
            if values.count(value) > 1:
                raise ValueError(f"two instances have the {what} {value}")
    return declared

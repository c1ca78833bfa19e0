"""The controller's loop: look at the world, let `reconcile` decide, act, publish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from disagg_router.controller.feed import FleetFeed
from disagg_router.controller.reconcile import Limits, Memory, World, reconcile
from disagg_router.errors import DisaggError, LaunchError
from disagg_router.interfaces import Action, Clock, Launcher, Observed, Start, Stop
from disagg_router.listening import bracketed
from disagg_router.model import EngineAddress, Fingerprint, Instance, InstanceId, InstanceSpec, InstanceState

_LOG_LINES = 20

Progress = Callable[[Mapping[InstanceId, InstanceState]], None]


class EngineLauncher(Launcher, Protocol):
    """A launcher that can show what an engine wrote."""

    async def log_tail(self, instance: InstanceId, lines: int) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`boot` is unique per controller start, so that no incarnation of an earlier one has the same name."""

    limits: Limits = field(default_factory=Limits)
    interval_s: float = 0.5
    probe_limit_s: float = 2.0
    stop_limit_s: float = 20.0
    boot: str = "0"


@dataclass(slots=True)
class _Seen:
    """One instance as others are told about it: the incarnation that last had an address, and its state."""

    incarnation: str = ""
    address: EngineAddress | None = None
    state: InstanceState = InstanceState.STARTING
    was_ready: bool = False  # this incarnation
    ever_ready: bool = False  # any incarnation


class Controller:
    """Keeps the wanted instances running and tells others about them."""

    def __init__(
        self,
        launcher: EngineLauncher,
        specs: Sequence[InstanceSpec],
        *,
        healthy: Callable[[str], Awaitable[bool]],
        fingerprint: Callable[[InstanceSpec], Fingerprint],
        clock: Clock,
        feed: FleetFeed,
        settings: LoopSettings,
        progress: Progress = lambda _: None,
    ) -> None:
        self._launcher = launcher
        self._specs = specs
        self._healthy = healthy
        self._fingerprint = fingerprint
        self._clock = clock
        self._feed = feed
        self._settings = settings
        self._progress = progress
        self._memory: Memory = {}
        self._seen = {spec.id: _Seen() for spec in specs}
        self._acting: dict[tuple[type[Action], str], tuple[Action, asyncio.Task[None]]] = {}
        self._failed_starts: list[Observed] = []

    async def bring_up(self) -> None:
        """Start everything; returns when every instance has answered once.

        Raises LaunchError, with the last lines of its log, for the first instance that ends or takes too long.
        """
        while not all(seen.ever_ready for seen in self._seen.values()):
            for one in await self.step():
                if not one.running and not self._seen[one.id].ever_ready:
                    raise await self._failure(one)
            for id, record in self._memory.items():
                if record.failures and not self._seen[id].ever_ready:
                    limit_s = self._settings.limits.start_limit_s
                    raise await self._with_log(id, f"{id} did not answer within {limit_s:g} s")
            await self._clock.sleep(self._settings.interval_s)

    async def run(self) -> None:
        """Keep things as they should be until cancelled."""
        while True:
            await self.step()
            await self._clock.sleep(self._settings.interval_s)

    async def step(self) -> tuple[Observed, ...]:
        """One round: observe, probe, reconcile, act, publish. Returns what was observed."""
        self._collect_done()
        observed = self._with_pending(tuple(await self._launcher.observe()))
        ready = await self._probe(observed)
        world = World(observed, ready, self._clock.now_s(), self._settings.boot)
        plan = reconcile(self._specs, world, self._memory, self._settings.limits)
        self._memory = plan.memory
        self._note_states(observed, ready)
        for action in plan.actions:
            self._act(action)
        self._publish()
        return observed

    async def stop(self) -> None:
        """Stop every engine; returns within `stop_limit_s`."""
        for seen in self._seen.values():
            seen.state = InstanceState.DRAINING
        self._publish()
        for one in self._with_pending(tuple(await self._launcher.observe())):
            self._act(Stop(one.id, one.incarnation))
        if self._acting:
            await asyncio.wait([task for _, task in self._acting.values()], timeout=self._settings.stop_limit_s)

    # --- parts ----------------------------------------------------------------------------------------------

    async def _failure(self, one: Observed) -> LaunchError:
        if one.address is None:  # nothing ran, so there is no log to show
            return LaunchError(one.exit_note or f"{one.id} could not be started")
        return await self._with_log(one.id, f"{one.id} ended while loading ({one.exit_note})")

    async def _with_log(self, id: InstanceId, sentence: str) -> LaunchError:
        tail = await self._launcher.log_tail(id, _LOG_LINES)
        if not tail:
            return LaunchError(f"{sentence}; its log is empty")
        return LaunchError("\n  ".join([f"{sentence}; its log ends with:", *tail]))

    def _collect_done(self) -> None:
        """Forget finished actions; what failed in an unforeseen way is raised here."""
        for key, (_, task) in [*self._acting.items()]:
            if task.done():
                del self._acting[key]
                task.result()

    def _with_pending(self, observed: tuple[Observed, ...]) -> tuple[Observed, ...]:
        """Starts that the launcher does not show yet count as running; starts that failed count as ended, once."""
        known = {one.incarnation for one in observed}
        failed, self._failed_starts = self._failed_starts, []
        failed = [one for one in failed if one.incarnation not in known]
        known |= {one.incarnation for one in failed}
        pending = [
            Observed(action.spec.id, action.incarnation, True, None)
            for action, _ in self._acting.values()
            if isinstance(action, Start) and action.incarnation not in known
        ]
        return (*observed, *failed, *pending)

    async def _probe(self, observed: Sequence[Observed]) -> frozenset[str]:
        """Incarnations that answer their health check."""
        running = [(one.incarnation, one.address) for one in observed if one.running and one.address]
        answers = await asyncio.gather(*(self._answers(_url(address)) for _, address in running))
        return frozenset(incarnation for (incarnation, _), ok in zip(running, answers, strict=True) if ok)

    async def _answers(self, url: str) -> bool:
        try:
            async with asyncio.timeout(self._settings.probe_limit_s):
                return await self._healthy(url)
        except TimeoutError:
            return False

    def _note_states(self, observed: Sequence[Observed], ready: frozenset[str]) -> None:
        addresses = {one.incarnation: one.address for one in observed if one.running and one.address}
        for id, seen in self._seen.items():
            record = self._memory[id]
            if record.incarnation in addresses and record.incarnation != seen.incarnation:
                seen.incarnation, seen.was_ready = record.incarnation, False
                seen.address = addresses[record.incarnation]
            seen.state = self._state(seen, record.incarnation, ready)
            if seen.state is InstanceState.READY:
                seen.was_ready = seen.ever_ready = True
        self._progress({id: seen.state for id, seen in self._seen.items()})

    def _state(self, seen: _Seen, current: str | None, ready: frozenset[str]) -> InstanceState:
        if current is None:
            return InstanceState.FAILED
        if current != seen.incarnation:
            return InstanceState.STARTING
        if current in ready:
            return InstanceState.READY
        return InstanceState.UNREACHABLE if seen.was_ready else InstanceState.STARTING

    def _act(self, action: Action) -> None:
        """Carry an action out beside the loop; the same one is never in flight twice."""
        key = (type(action), action.incarnation)
        if key not in self._acting:
            self._acting[key] = (action, asyncio.create_task(self._carry_out(action)))

    async def _carry_out(self, action: Action) -> None:
        try:
            await self._launcher.apply(action)
        except DisaggError as exc:
            if isinstance(action, Start):
                self._failed_starts.append(Observed(action.spec.id, action.incarnation, False, None, str(exc)))

    def _publish(self) -> None:
        self._feed.publish(
            tuple(
                self._instance(spec, seen, seen.address)
                for spec in self._specs
                if (seen := self._seen[spec.id]).address is not None
            )
        )

    def _instance(self, spec: InstanceSpec, seen: _Seen, address: EngineAddress) -> Instance:
        host = bracketed(address.host)
        return Instance(
            id=spec.id,
            role=spec.role,
            url=_url(address),
            state=seen.state,
            incarnation=seen.incarnation,
            engine_id=seen.incarnation,
            fingerprint=self._fingerprint(spec),
            kv_events=f"tcp://{host}:{address.kv_events_port}",
            side_channel=f"{host}:{address.side_channel_port}",
        )


def _url(address: EngineAddress) -> str:
    return f"http://{bracketed(address.host)}:{address.http_port}"

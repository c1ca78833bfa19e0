"""The launcher on Ray: one actor with its own placement group per instance."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from disagg_router.controller.engine_host import EngineHost, HostEnd, HostSettings, log_path, log_tail, reachable_host
from disagg_router.controller.ray_session import RaySession, first_line
from disagg_router.errors import DisaggError, LaunchError
from disagg_router.interfaces import Action, CommandBuilder, Observed, Start, Stop
from disagg_router.model import EngineAddress, InstanceId, InstanceSpec

T = TypeVar("T")

_ACTOR_LIMIT_S = 60.0  # a worker process on a loaded node takes seconds to come up


@dataclass(slots=True)
class _Engine:
    """One incarnation as the driver knows it. `end` resolves to a note when all its processes are gone."""

    spec: InstanceSpec
    incarnation: str
    group: PlacementGroup | None = None
    actor: Any = None
    address: EngineAddress | None = None
    end: Any = None
    note: str | None = None
    log_tail: tuple[str, ...] = ()
    released: bool = False


class _Host(EngineHost):
    """EngineHost as an actor: adds the one thing that only Ray knows."""

    def reserve_on(self, own_ray: bool, peer_ips: Sequence[str]) -> EngineAddress:
        # A Ray of our own never has a second node, so nothing needs to be reachable from outside.
        host = "127.0.0.1" if own_ray else reachable_host(_node_ip(), peer_ips)
        return self.reserve(host)


class RayLauncher:
    """Launcher on Ray. Blocking calls run in threads, each with a limit."""

    def __init__(
        self, session: RaySession, build: CommandBuilder, settings: HostSettings, placement_limit_s: float = 60.0
    ) -> None:
        self._session = session
        self._build = build
        self._settings = settings
        self._placement_limit_s = placement_limit_s
        self._engines: dict[str, _Engine] = {}
        # Not asyncio's own pool: a few instances that wait for a place would fill it.
        self._threads = ThreadPoolExecutor(max_workers=64, thread_name_prefix="ray")

    @property
    def lifelines(self) -> Sequence[int]:
        return self._session.lifelines

    def close(self) -> None:
        """Leave Ray; a Ray of our own ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        ray.shutdown()

    async def observe(self) -> Iterable[Observed]:
        """Every incarnation that was started and not yet stopped."""
        watched = [engine for engine in self._engines.values() if engine.end is not None and engine.note is None]
        if watched:
            await self._in_thread(_note_ended, watched)
        return [Observed(e.spec.id, e.incarnation, e.note is None, e.address, e.note) for e in self._engines.values()]

    async def apply(self, action: Action) -> None:
        """Raises LaunchError when an instance cannot be placed or its process cannot be started."""
        if isinstance(action, Start):
            engine = _Engine(action.spec, action.incarnation)
            self._engines[action.incarnation] = engine
            try:
                await self._in_thread(self._start, engine)
            except DisaggError:
                await self._stop(engine)
                raise
            except Exception as exc:  # a placement group that was removed meanwhile is a bare Exception of Ray's
                await self._stop(engine)
                raise LaunchError(f"{action.spec.id} could not be started: {first_line(exc)}") from exc
        elif isinstance(action, Stop) and (found := self._engines.get(action.incarnation)):
            await self._stop(found)

    async def log_tail(self, instance: InstanceId, lines: int) -> Sequence[str]:
        """The last lines of an instance's log, from its node where that still answers."""
        for engine in reversed(self._engines.values()):
            if engine.spec.id == instance and engine.log_tail:
                return engine.log_tail[-lines:]
            if engine.spec.id == instance and engine.actor is not None:
                with contextlib.suppress(LaunchError):
                    tail: list[str] = await self._in_thread(_get, engine.actor.log_tail.remote(lines), 5.0)
                    return tail
        return log_tail(log_path(self._settings.log_folder, instance), lines)

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:  # noqa: ANN401
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    def _start(self, engine: _Engine) -> None:
        spec = engine.spec
        group = self._place(engine)
        engine.actor = (
            ray.remote(_Host)
            .options(
                num_cpus=1,
                num_gpus=spec.gpus,
                max_restarts=0,  # a new incarnation gets a new actor, ports and log
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group),
            )
            .remote(spec, engine.incarnation, self._settings)
        )
        peers = [node["NodeManagerAddress"] for node in _alive_nodes()]
        reserve = engine.actor.reserve_on.remote(self._session.own, peers)
        address: EngineAddress = _get(reserve, _ACTOR_LIMIT_S)
        engine.address = address
        self._check_wanted(engine)
        command = self._build(spec, address, engine.incarnation)
        _get(engine.actor.spawn.remote(command), _ACTOR_LIMIT_S)
        engine.end = engine.actor.wait_ended.remote()
        self._check_wanted(engine)

    def _place(self, engine: _Engine) -> PlacementGroup:
        spec = engine.spec
        bundle = {"CPU": 1.0, **({"GPU": float(spec.gpus)} if spec.gpus else {})}
        labels = dict(spec.labels)
        group: PlacementGroup = placement_group([bundle], "STRICT_PACK", bundle_label_selector=[labels])
        engine.group = group
        end_s = time.monotonic() + self._placement_limit_s
        while not group.wait(1):
            self._check_wanted(engine)
            if time.monotonic() >= end_s:
                raise LaunchError(
                    f"no node could take {spec.id} within {self._placement_limit_s:g} s: it asks for "
                    f"{_amounts(bundle)}{f' on a node labelled {labels}' if labels else ''}, Ray has {_nodes()}; "
                    "add such a node or ask for less"
                )
        return group

    def _check_wanted(self, engine: _Engine) -> None:
        """A Stop may overtake a start, which runs in a thread and cannot be cancelled."""
        if engine.released:
            _release(engine)
            raise LaunchError(f"{engine.spec.id} was stopped while it was starting")

    async def _stop(self, engine: _Engine) -> None:
        engine.released = True
        await self._in_thread(self._end, engine)
        self._engines.pop(engine.incarnation, None)

    def _end(self, engine: _Engine) -> None:
        if engine.actor is not None and engine.note is None:
            # An actor that does not answer is killed below, and its supervisor ends the engine.
            with contextlib.suppress(LaunchError):
                _get(engine.actor.stop.remote(), self._settings.grace_s + 20)
        _release(engine)


def _release(engine: _Engine) -> None:
    with contextlib.suppress(RayError):
        if engine.actor is not None:
            ray.kill(engine.actor)
        if engine.group is not None:
            remove_placement_group(engine.group)


def _note_ended(engines: Sequence[_Engine]) -> None:
    by_ref = {engine.end: engine for engine in engines}
    ended, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0)
    for ref in ended:
        try:
            end: HostEnd = ray.get(ref, timeout=5)
            by_ref[ref].log_tail = end.log_tail
            by_ref[ref].note = end.note
        except (GetTimeoutError, ActorUnavailableError):
            by_ref[ref].end = by_ref[ref].actor.wait_ended.remote()
        except RayError as exc:
            by_ref[ref].note = f"its actor is gone ({type(exc).__name__})"


def _get(ref: Any, limit_s: float) -> Any:  # noqa: ANN401 - Ray's references are untyped
    """The value of a reference. Raises LaunchError in place of all of Ray's errors."""
    try:
        return ray.get(ref, timeout=limit_s)
    except RayTaskError as exc:
        if isinstance(exc.cause, DisaggError):
            raise exc.cause from exc
        raise LaunchError(f"an actor failed: {exc.cause}") from exc
    except GetTimeoutError as exc:
        raise LaunchError(f"an actor did not answer within {limit_s:g} s: look at `ray status`") from exc
    except RayError as exc:
        # Ray's last line is the reason, for example a package that the node lacks; the ones before are identifiers.
        raise LaunchError(f"an actor is gone: {str(exc).strip().splitlines()[-1].strip()}") from exc


def _nodes() -> str:
    shown = (
        f"{node['NodeManagerAddress']} with {_amounts(node['Resources'])}, labels {node.get('Labels') or {}}"
        for node in _alive_nodes()
    )
    return "; ".join(shown) or "no node"


def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))

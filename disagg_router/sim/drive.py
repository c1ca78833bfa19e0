"""Sends a workload's arrivals through the router, each at its time, and notes what becomes of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from disagg_router.errors import ErrorCode, RequestError
from disagg_router.interfaces import PathPolicy, Reject
from disagg_router.model import Decision, InferenceRequest
from disagg_router.routing.streams import Stream
from disagg_router.sim.client import SimResponse
from disagg_router.sim.jobs import Job
from disagg_router.sim.loop import VirtualLoop, run
from disagg_router.sim.model import Arrival, End, Outcome, Workload
from disagg_router.sim.noise import Delay
from disagg_router.sim.world import SILENT, Setup, Taps, World, build

ENDPOINT = "/v1/completions"
FOLLOW_S = 0.1  # as old as the router lets its view of a stream become
_FAILURES = (ErrorCode.UPSTREAM_ERROR, ErrorCode.UPSTREAM_TIMEOUT, ErrorCode.INTERNAL)


@dataclass(frozen=True, slots=True)
class Run:
    outcomes: tuple[Outcome, ...]
    world: World
    end_s: float


def simulate(
    setup: Setup,
    workload: Workload,
    policy: PathPolicy,
    *,
    watch: Callable[[World], None] = lambda _: None,
    progress: Callable[[int], None] = lambda _: None,
    taps: Taps = SILENT,
) -> Run:
    """`watch` is called with the world before anything happens: it may put tasks of its own on the loop, which end with
    the run. `progress` hears how many arrivals have ended."""
    loop = VirtualLoop()

    async def main() -> Run:
        world = build(setup, workload, policy, loop, taps)
        watch(world)
        gauge = asyncio.create_task(world.parts.gauge.run())
        outcomes = await _Driver(world, workload, setup, progress).run()
        gauge.cancel()
        await asyncio.gather(gauge, return_exceptions=True)
        return Run(outcomes, world, loop.time())

    return run(main(), loop)


class _Record:
    """What the router says of one request."""

    __slots__ = ("decision", "queued_s")

    def __init__(self) -> None:
        self.decision: Decision | None = None
        self.queued_s = 0.0

    def decided(self, decision: Decision, request: InferenceRequest) -> None:
        self.decision = decision

    def queued(self, wait_s: float) -> None:
        self.queued_s += wait_s

    def rejected(self, rejection: Reject) -> None: ...


class _Driver:
    def __init__(self, world: World, workload: Workload, setup: Setup, progress: Callable[[int], None]) -> None:
        self._world, self._workload, self._slo, self._progress = world, workload, setup.slo, progress
        self._delay = Delay(setup.noise.state_age_s, world.loop)
        self._now_s = world.loop.time
        self._live: dict[Job, Stream] = {}
        self._outcomes, self._underway = world.standing.outcomes, world.standing.underway

    async def run(self) -> tuple[Outcome, ...]:
        follower = asyncio.create_task(self._keep_following())
        async with asyncio.TaskGroup() as group:
            for arrival in self._workload.arrivals:
                if (wait_s := arrival.at_s - self._now_s()) > 0:
                    await asyncio.sleep(wait_s)
                    self._follow()  # it meets streams that are counted up to now, as behind a relay
                group.create_task(self._serve(arrival))
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        return tuple(sorted(self._outcomes, key=lambda outcome: outcome.number))

    async def _serve(self, arrival: Arrival) -> None:
        record, number = _Record(), arrival.number
        self._underway[number] = None
        body = {"model": "sim", "prompt": number, "max_tokens": arrival.output_tokens, "stream": True}
        asked = InferenceRequest(str(number), ENDPOINT, stream=True, splittable=True, slo=self._slo)
        try:
            async with self._world.parts.router.route(asked, body, record=record) as routed:
                assert isinstance(routed.response, SimResponse)
                job, stream = routed.response.job, routed.stream
                assert stream is not None
                stream.follow(1, job.first_s, 0.0)
                self._live[job] = stream
                self._underway[number] = job
                try:
                    await job.done
                finally:
                    del self._live[job]
                stream.follow(job.tokens, job.last_s, job.max_gap_s)
                routed.complete = True
            self._outcomes.append(_done(arrival, job, record))
        except RequestError as exc:
            end = End.FAILED if exc.code in _FAILURES else End.REFUSED
            self._outcomes.append(_ended(arrival, end, record))
        finally:
            del self._underway[number]
            self._world.client.ended(number)
            self._progress(len(self._outcomes))

    async def _keep_following(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            self._follow()

    def _follow(self) -> None:
        for engine in self._world.engines.values():
            engine.catch_up()
        far = [(job, stream, job.tokens, job.last_s, job.max_gap_s) for job, stream in self._live.items()]
        self._delay.tell(lambda: self._tell(far))

    def _tell(self, far: list[tuple[Job, Stream, int, float, float]]) -> None:
        for job, stream, tokens, last_s, max_gap_s in far:
            if job in self._live:  # still, when this is heard of
                stream.follow(tokens, last_s, max_gap_s)


def _ended(arrival: Arrival, end: End, record: _Record) -> Outcome:
    return Outcome(
        number=arrival.number,
        at_s=arrival.at_s,
        end=end,
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=arrival.output_tokens,
        path=record.decision.path if record.decision else None,
        queued_s=record.queued_s,
    )


def _done(arrival: Arrival, job: Job, record: _Record) -> Outcome:
    return dataclasses.replace(
        _ended(arrival, End.DONE, record),
        ttft_s=job.first_s - arrival.at_s,
        tpot_s=(job.last_s - job.first_s) / max(1, arrival.output_tokens - 1),
        max_gap_s=job.max_gap_s,
        done_s=job.last_s,
    )

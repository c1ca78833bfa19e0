"""One request from its decision to an open decode leg. The flow is the same for every path: paths differ in data."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from disagg_router.errors import Draining, NoDecodeInstance, QueueFull, UpstreamError, UpstreamUnreachable
from disagg_router.interfaces import Admission, EngineResponse, OutputPredictor, Reject, RouteRecord
from disagg_router.model import Body, Decision, InferenceRequest, Target
from disagg_router.routing.legs import HandoffExpired, LegFailed, Legs, Work
from disagg_router.routing.placement import Placement, Placer
from disagg_router.routing.prompts import PromptReader
from disagg_router.routing.streams import Stream

TRIES_AFTER_A_FAILURE = 1  # a request that broke one engine gets one more, never a third


@dataclass(slots=True)
class Routed:
    """A decode leg that is open: its status is 200 and nothing of it has gone to the client yet.

    Whoever passes it on counts its events in `stream` (None: unstreamed), and says when all of it has gone out.
    """

    decision: Decision
    response: EngineResponse
    stream: Stream | None
    complete: bool = False


class Router:
    """Counts, decides, waits for room, opens the legs, decides again without the target that failed.

    `failed` hears of every leg that went wrong; `waiting_requests` bounds how many may wait for their first byte at
    once.
    """

    def __init__(
        self,
        *,
        placer: Placer,
        legs: Legs,
        prompts: PromptReader,
        outputs: OutputPredictor,
        failed: Callable[[Target, UpstreamError], None],
        waiting_requests: int,
        now_s: Callable[[], float],
    ) -> None:
        self._placer, self._legs, self._prompts, self._outputs = placer, legs, prompts, outputs
        self._waiting_requests, self._now_s = waiting_requests, now_s
        self._waiting = 0
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.failed = failed
        self.loads = placer.loads
        self.draining = False

    @asynccontextmanager
    async def route(
        self,
        request: InferenceRequest,
        body: Body,
        headers: tuple[tuple[str, str], ...] = (),
        record: RouteRecord | None = None,
    ) -> AsyncIterator[Routed]:
        """Entered when the first byte may go to the client; everything held is let go on the way out.

        `record` hears of every decision, also of those that come to nothing. Raises RequestError: what the client
        is told instead.
        """
        self._enter()
        try:
            async with AsyncExitStack() as legs:
                routed = await self._first_byte(Work(request, body, headers), record or _Unrecorded(), legs)
                yield routed
                if routed.complete and routed.stream is not None:
                    self._outputs.observe(request.max_output_tokens, routed.stream.tokens)
        finally:
            self._leave()

    async def decide(self, request: InferenceRequest, body: Body) -> tuple[Decision, Admission]:
        """What `route` would decide now, and whether it would be let in; nothing is sent or held beyond the tokenizer
        call."""
        judged = self._placer.judge(await self._counted(request, body), self._now_s())
        return judged.decision, judged.admission

    async def drain(self, limit_s: float) -> bool:
        """Take nothing new and wait for what runs. False when the limit came first."""
        self.draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
                await self._legs.finish_releases()
        except TimeoutError:
            return False
        return True

    # --- steps ---

    async def _first_byte(self, work: Work, record: RouteRecord, legs: AsyncExitStack) -> Routed:
        if self._waiting >= self._waiting_requests:
            raise QueueFull(f"{self._waiting} requests already wait for their first byte", retry_after_s=1)
        arrived_s = self._now_s()
        self._waiting += 1
        try:
            counted = await self._counted(work.request, work.body)
            return await self._opened(dataclasses.replace(work, request=counted), arrived_s, record, legs)
        finally:
            self._waiting -= 1

    async def _opened(self, work: Work, arrived_s: float, record: RouteRecord, legs: AsyncExitStack) -> Routed:
        """Decide and try. Ends, since each round excludes a target or spends a try."""
        tries_left = TRIES_AFTER_A_FAILURE
        last: UpstreamError | None = None
        while True:
            placement = await self._placed(work.request, arrived_s, last, record)
            try:
                async with AsyncExitStack() as attempt:
                    attempt.callback(self._placer.freed)  # entered first, so called last
                    response = await self._legs.open(work, placement, attempt)
                    stream = self._watched(work.request, placement, attempt) if work.request.stream else None
                    legs.push_async_exit(attempt.pop_all())
                    self._placer.freed()  # its prefill place, and its link
                    decision = placement.decision
                    self._prompts.served(work.request.id, {decision.decode, decision.prefiller})
                    return Routed(decision, response, stream)
            except HandoffExpired:
                last = UpstreamError("the handoff grew older than half its lease before it could be sent")
                spent = True
            except LegFailed as failed:
                last, spent = failed.error, not isinstance(failed.error, UpstreamUnreachable)
                work = self._without(work, failed)
            if spent:
                if not tries_left:
                    raise last
                tries_left -= 1

    async def _placed(
        self, request: InferenceRequest, arrived_s: float, last: UpstreamError | None, record: RouteRecord
    ) -> Placement:
        try:
            return await self._placer.place(request, arrived_s, record)
        except NoDecodeInstance:
            if last is not None:  # there was one, and it failed: say how
                raise last from None
            raise

    def _without(self, work: Work, failed: LegFailed) -> Work:
        self.failed(failed.target, failed.error)
        excluded = work.request.excluded | {failed.target}
        return dataclasses.replace(work, request=dataclasses.replace(work.request, excluded=excluded))

    # --- small parts ---

    def _watched(self, request: InferenceRequest, placement: Placement, attempt: AsyncExitStack) -> Stream:
        stream = self.loads.streams.open(
            placement.decision.decode,
            request.slo,
            prompt_tokens=request.prompt_tokens or 0,
            expected_tokens=request.output_tokens,
            max_tokens=request.max_output_tokens,
            now_s=self._now_s(),
        )
        attempt.callback(stream.close)
        return stream

    async def _counted(self, request: InferenceRequest, body: Body) -> InferenceRequest:
        """With its exact number of tokens and what is cached of them, where the policy wants to know, and with the
        number of tokens to expect of its answer."""
        expected = self._outputs.expect(request.max_output_tokens)
        request = dataclasses.replace(request, output_tokens=expected)
        if not self._placer.needs_token_count or not request.countable:
            return request
        return await self._prompts.read(request, body)

    def _enter(self) -> None:
        if self.draining:
            raise Draining("this router is shutting down: send the request to another one", retry_after_s=1)
        self._active += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._active -= 1
        if not self._active:
            self._idle.set()


class _Unrecorded:
    """Nobody wants to know."""

    def decided(self, decision: Decision, request: InferenceRequest) -> None: ...

    def queued(self, wait_s: float) -> None: ...

    def rejected(self, rejection: Reject) -> None: ...

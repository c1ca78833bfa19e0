"""One request from its decision to an open decode leg. The flow is the same for every path: paths differ in data."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from disagg_router.errors import (
    Draining,
    NoDecodeInstance,
    QueueFull,
    UpstreamError,
    UpstreamUnreachable,
)
from disagg_router.interfaces import EngineResponse, PathPolicy, RouteObserver
from disagg_router.model import Body, Decision, InferenceRequest, Target
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.leases import LeaseBook
from disagg_router.routing.legs import HandoffExpired, LegFailed, Legs, Work
from disagg_router.routing.prompts import PromptReader

TRIES_AFTER_A_FAILURE = 1  # a request that broke one engine gets one more, never a third


@dataclass(frozen=True, slots=True)
class Routed:
    """A decode leg that is open: its status is 200 and nothing of it has gone to the client yet."""

    decision: Decision
    response: EngineResponse


class Router:
    """Counts, decides, opens the legs, decides again without the target that failed.

    `fleet` reads the brain's published picture; `failed` hears of every leg that went wrong;
    `waiting_requests` bounds how many may wait for their first byte at once.
    """

    def __init__(
        self,
        *,
        policy: PathPolicy,
        legs: Legs,
        leases: LeaseBook,
        prompts: PromptReader,
        fleet: Callable[[], Fleet],
        failed: Callable[[Target, UpstreamError], None],
        waiting_requests: int,
        observer: RouteObserver,
        now_s: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._policy, self._legs, self._prompts = policy, legs, prompts
        self._fleet, self._waiting_requests = fleet, waiting_requests
        self._observer, self._now_s, self._rng = observer, now_s, rng
        self._waiting = 0
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.failed = failed
        self.leases = leases
        self.draining = False

    @asynccontextmanager
    async def route(
        self,
        request: InferenceRequest,
        body: Body,
        headers: tuple[tuple[str, str], ...] = (),
        decided: Callable[[Decision], None] = lambda _: None,
    ) -> AsyncIterator[Routed]:
        """Entered when the first byte may go to the client; everything held is let go on the way out.

        `decided` hears of every decision, also of those that come to nothing. Raises RequestError: what the client
        is told instead.
        """
        self._enter()
        try:
            async with AsyncExitStack() as legs:
                yield await self._first_byte(Work(request, body, headers), decided, legs)
        finally:
            self._leave()

    async def decide(self, request: InferenceRequest, body: Body) -> Decision:
        """The decision `route` would take now, with nothing sent or held beyond the tokenizer call."""
        return self._decide(await self._counted(request, body))

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

    async def _first_byte(self, work: Work, decided: Callable[[Decision], None], legs: AsyncExitStack) -> Routed:
        if self._waiting >= self._waiting_requests:
            raise QueueFull(f"{self._waiting} requests already wait for their first byte", retry_after_s=1)
        self._waiting += 1
        try:
            counted = await self._counted(work.request, work.body)
            return await self._opened(dataclasses.replace(work, request=counted), decided, legs)
        finally:
            self._waiting -= 1

    async def _opened(self, work: Work, decided: Callable[[Decision], None], legs: AsyncExitStack) -> Routed:
        """Decide and try. Ends, since each round excludes a target or spends a try."""
        tries_left = TRIES_AFTER_A_FAILURE
        last: UpstreamError | None = None
        while True:
            decision = self._decide_again(work.request, last)
            self._observer.decided(work.request, decision)
            decided(decision)
            try:
                async with AsyncExitStack() as attempt:
                    response = await self._legs.open(work, decision, attempt)
                    legs.push_async_exit(attempt.pop_all())
                    return Routed(decision, response)
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

    def _decide_again(self, request: InferenceRequest, last: UpstreamError | None) -> Decision:
        try:
            return self._decide(request)
        except NoDecodeInstance:
            if last is not None:  # there was one, and it failed: say how
                raise last from None
            raise

    def _without(self, work: Work, failed: LegFailed) -> Work:
        self.failed(failed.target, failed.error)
        excluded = work.request.excluded | {failed.target}
        return dataclasses.replace(work, request=dataclasses.replace(work.request, excluded=excluded))

    # --- small parts ---

    def _decide(self, request: InferenceRequest) -> Decision:
        view = self._fleet().view(self._now_s(), self.leases.load)
        return self._policy.decide(dataclasses.replace(request, tiebreak=self._rng.random()), view)

    async def _counted(self, request: InferenceRequest, body: Body) -> InferenceRequest:
        """With its exact number of tokens and what is cached of them, where the policy wants to know."""
        if not self._policy.needs_token_count or not request.splittable or request.forced_path is not None:
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

"""One request from decision to open decode leg. The flow is the same for every path: paths differ in data."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec

from disagg_router.errors import (
    Draining,
    NoDecodeInstance,
    QueueFull,
    UpstreamError,
    UpstreamRefused,
    UpstreamUnreachable,
)
from disagg_router.interfaces import (
    Clock,
    EngineCall,
    EngineClient,
    EngineResponse,
    KVConnector,
    PathPolicy,
    RouteObserver,
)
from disagg_router.model import (
    Body,
    Decision,
    Handoff,
    HandoffResult,
    InferenceRequest,
    Instance,
    InstanceId,
    Pair,
    PairState,
    Path,
    Target,
)
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.leases import LeaseBook, LeaseKind

log = logging.getLogger(__name__)

TRIES_AFTER_A_FAILURE = 1  # a request that broke one engine gets one more, never a third
RELEASE_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class RouterLimits:
    waiting_requests: int  # requests that may wait for their first byte at once
    prefill_s: float
    first_byte_s: float
    unary_s: float  # an unstreamed answer has no first byte before it is whole


@dataclass(frozen=True, slots=True)
class Routed:
    """A decode leg that is open: its status is 200 and nothing of it has gone to the client yet."""

    decision: Decision
    response: EngineResponse


class _LegFailed(Exception):
    """A leg of this decision failed in a way that another target may not."""

    def __init__(self, target: Target, error: UpstreamError) -> None:
        super().__init__(str(error))
        self.target, self.error = target, error


class _HandoffExpired(Exception):
    """The handoff grew too old, or its prefill was restarted, before it could be sent."""


class _Ticket:
    """What becomes of one handoff. Once its bytes are on their way it is the decode engine's: that one pulls, and
    lets go when the pull is done or its client hangs up. A release beside it could free blocks that are being read."""

    def __init__(self) -> None:
        self.result = HandoffResult.ABANDONED

    def sent(self) -> None:
        self.result = HandoffResult.SENT


class Router:
    """Decides, prefills, opens the decode leg; holds the leases meanwhile.

    `fleet` reads the brain's published picture; `suspect` tells the brain that a target has just failed.
    """

    def __init__(
        self,
        *,
        policy: PathPolicy,
        connector: KVConnector,
        client: EngineClient,
        fleet: Callable[[], Fleet],
        suspect: Callable[[InstanceId], None],
        limits: RouterLimits,
        observer: RouteObserver,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._policy, self._connector, self._client = policy, connector, client
        self._fleet, self._suspect, self._limits = fleet, suspect, limits
        self._observer, self._clock, self._rng = observer, clock, rng
        self._waiting = 0
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._releases: set[asyncio.Task[None]] = set()
        self.leases = LeaseBook()
        self.draining = False

    @asynccontextmanager
    async def route(
        self, request: InferenceRequest, body: Body, headers: tuple[tuple[str, str], ...] = ()
    ) -> AsyncIterator[Routed]:
        """Entered when the first byte may go to the client; everything held is let go on the way out.

        Raises RequestError: what the client is told instead.
        """
        self._enter()
        try:
            async with AsyncExitStack() as legs:
                yield await self._first_byte(request, body, headers, legs)
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
                await asyncio.gather(*self._releases)
        except TimeoutError:
            return False
        return True

    # --- steps ---

    async def _first_byte(
        self, request: InferenceRequest, body: Body, headers: tuple[tuple[str, str], ...], legs: AsyncExitStack
    ) -> Routed:
        if self._waiting >= self._limits.waiting_requests:
            raise QueueFull(f"{self._waiting} requests already wait for their first byte", retry_after_s=1)
        self._waiting += 1
        try:
            request = await self._counted(request, body)
            return await self._opened(request, body, headers, legs)
        finally:
            self._waiting -= 1

    async def _opened(
        self, request: InferenceRequest, body: Body, headers: tuple[tuple[str, str], ...], legs: AsyncExitStack
    ) -> Routed:
        """Decide and try, again without the target that failed. Ends since each round excludes a target or spends
        a try."""
        tries_left = TRIES_AFTER_A_FAILURE
        last: UpstreamError | None = None
        while True:
            try:
                decision = self._decide(request)
            except NoDecodeInstance:
                if last is not None:  # there was one, and it failed: say how
                    raise last from None
                raise
            self._observer.decided(request, decision)
            try:
                async with AsyncExitStack() as attempt:
                    response = await self._legs(request, body, headers, decision, attempt)
                    legs.push_async_exit(attempt.pop_all())
                    return Routed(decision, response)
            except _HandoffExpired:
                last = UpstreamError("the handoff grew older than half its lease before it could be sent")
                if not tries_left:
                    raise last from None
                tries_left -= 1
            except _LegFailed as failed:
                last = failed.error
                self._observer.leg_failed(failed.target, last)
                self._suspect(failed.target.instance)
                if not isinstance(last, UpstreamUnreachable):
                    if not tries_left:
                        raise last from failed
                    tries_left -= 1
                request = dataclasses.replace(request, excluded=request.excluded | {failed.target})

    async def _legs(
        self,
        request: InferenceRequest,
        body: Body,
        headers: tuple[tuple[str, str], ...],
        decision: Decision,
        attempt: AsyncExitStack,
    ) -> EngineResponse:
        """Both legs of one decision. Decode room is held before prefill compute is spent."""
        attempt.enter_context(self.leases.take(LeaseKind.DECODE, decision.decode))
        decode = self._instance(decision.decode)
        if decision.prefill is None:
            local = self._connector.local_body(body, load_external=decision.path is not Path.RECOMPUTE)
            call = self._decode_call(request, local, headers)
            return await self._open_decode(decision.decode, decode, call, attempt)
        with self.leases.take(LeaseKind.HANDOFF, decision.prefill):
            handoff = await self._prefill(request, body, headers, decision.prefill, decode)
            ticket = _Ticket()
            try:
                if not self._fresh(handoff):
                    ticket.result = HandoffResult.EXPIRED
                    raise _HandoffExpired
                call = self._decode_call(request, self._connector.decode_body(body, handoff), headers)
                call = dataclasses.replace(call, once=True, on_sent=ticket.sent)
                return await self._open_decode(decision.decode, decode, call, attempt)
            finally:
                self._observer.handoff(ticket.result)
                if ticket.result is not HandoffResult.SENT:
                    self._release(request, body, handoff, headers)

    async def _prefill(
        self,
        request: InferenceRequest,
        body: Body,
        headers: tuple[tuple[str, str], ...],
        target: Target,
        decode: Instance,
    ) -> Handoff:
        prefill = self._instance(target)
        handoff = self._connector.begin(request.id, prefill, decode)
        call = EngineCall(
            path=request.endpoint,
            body=msgspec.json.encode(self._connector.prefill_body(body, handoff)),
            headers=headers,
            head_limit_s=self._limits.prefill_s,
        )
        with self.leases.take(LeaseKind.PREFILL, target):
            try:
                async with self._client.open(prefill.url, call) as response:
                    answer = msgspec.json.decode(await response.read(), type=dict[str, object])
                return self._connector.complete(handoff, answer, self._clock.now_s())
            except UpstreamRefused:
                raise
            except UpstreamError as exc:
                raise _LegFailed(target, exc) from exc
            except msgspec.MsgspecError as exc:
                raise _LegFailed(target, UpstreamError(f"{prefill.id} did not answer in JSON")) from exc

    async def _open_decode(
        self, target: Target, instance: Instance, call: EngineCall, attempt: AsyncExitStack
    ) -> EngineResponse:
        try:
            return await attempt.enter_async_context(self._client.open(instance.url, call))
        except UpstreamRefused:
            raise
        except UpstreamError as exc:
            raise _LegFailed(target, exc) from exc

    def _decode_call(self, request: InferenceRequest, body: Body, headers: tuple[tuple[str, str], ...]) -> EngineCall:
        limit_s = self._limits.first_byte_s if request.stream else self._limits.unary_s
        return EngineCall(request.endpoint, msgspec.json.encode(body), headers, head_limit_s=limit_s)

    # --- the handoff's safety ---

    def _fresh(self, handoff: Handoff) -> bool:
        """Past its lease a handoff is answered with another prompt's KV and HTTP 200; half the lease is the margin.
        From another incarnation it is worth nothing."""
        now = self._fleet().instances.get(handoff.pair.prefill)
        if now is None or now.incarnation != handoff.prefill_incarnation or handoff.answered_s is None:
            return False
        return self._clock.now_s() - handoff.answered_s <= self._connector.lease_s / 2

    def _release(
        self, request: InferenceRequest, body: Body, handoff: Handoff, headers: tuple[tuple[str, str], ...]
    ) -> None:
        """Free the prefill's blocks now instead of at the end of the lease. Runs beside the request, which may
        already be cancelled."""
        release = self._connector.release_body(body, handoff)
        if release is None:
            return
        call = EngineCall(
            request.endpoint, msgspec.json.encode(release), headers, once=True, head_limit_s=RELEASE_LIMIT_S
        )
        task = asyncio.get_running_loop().create_task(self._send_release(handoff.pair, call))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _send_release(self, pair: Pair, call: EngineCall) -> None:
        """Through the decode instance it was meant for, or through another that knows the prefill."""
        fleet = self._fleet()
        others = [p.decode for p, s in fleet.pairs.items() if p.prefill == pair.prefill and s.state is PairState.READY]
        ready = {instance.id: instance for instance in fleet.ready()}
        ways = [ready[id_] for id_ in dict.fromkeys([pair.decode, *others]) if id_ in ready][:2]
        for decode in ways:
            try:
                async with self._client.open(decode.url, call):
                    log.warning("%s served a release as if it were a request", decode.id)
            except UpstreamRefused:
                return  # the refusal is what frees the blocks
            except UpstreamError as exc:
                log.warning("a handoff of %s could not be released through %s: %s", pair.prefill, decode.id, exc)
        log.warning("a handoff of %s stays until its lease ends", pair.prefill)

    # --- small parts ---

    def _decide(self, request: InferenceRequest) -> Decision:
        view = self._fleet().view(self._clock.now_s(), self.leases.load)
        return self._policy.decide(dataclasses.replace(request, tiebreak=self._rng.random()), view)

    async def _counted(self, request: InferenceRequest, body: Body) -> InferenceRequest:
        """With its exact number of tokens, where the policy wants it. A tokenizer that fails costs the request its
        count (it is then served as a short one), not its answer."""
        if not self._policy.needs_token_count or not request.splittable or request.forced_path is not None:
            return request
        for instance in self._tokenizers():
            try:
                return dataclasses.replace(request, prompt_tokens=await self._client.tokenize(instance.url, body))
            except UpstreamRefused:
                raise
            except UpstreamError as exc:
                self._observer.leg_failed(Target(instance.id), exc)
                self._suspect(instance.id)
        return request

    def _tokenizers(self) -> list[Instance]:
        """Two instances to ask, the least busy first: every engine of a model has the same tokenizer."""

        def busy(instance: Instance) -> int:
            load = self.leases.load(Target(instance.id))
            return load.prefills + load.decodes

        ready = self._fleet().ready()
        self._rng.shuffle(ready)
        return sorted(ready, key=busy)[:2]

    def _instance(self, target: Target) -> Instance:
        return self._fleet().instances[target.instance]

    def _enter(self) -> None:
        if self.draining:
            raise Draining("this router is shutting down: send the request to another one", retry_after_s=1)
        self._active += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._active -= 1
        if not self._active:
            self._idle.set()

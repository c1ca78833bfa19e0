"""The engine requests of one decision: a decode leg alone, or a prefill leg, its handoff and the decode leg."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from disagg_router.errors import UpstreamError, UpstreamRefused
from disagg_router.interfaces import (
    Clock,
    CostModel,
    EngineCall,
    EngineClient,
    EngineResponse,
    KVConnector,
    RouteObserver,
)
from disagg_router.model import (
    Body,
    Handoff,
    HandoffResult,
    InferenceRequest,
    Instance,
    Pair,
    PairState,
    Path,
    Target,
)
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.leases import HandoffLease
from disagg_router.routing.placement import Placement

log = logging.getLogger(__name__)

RELEASE_LIMIT_S = 5.0
RELEASE_ENDPOINT = "/v1/completions"
UNSEEN_PULL_S, UNSEEN_PULL_TIMES = 1.0, 3.0


@dataclass(frozen=True, slots=True)
class LegLimits:
    prefill_s: float
    first_byte_s: float
    unary_s: float  # an unstreamed answer has no first byte before it is whole


@dataclass(frozen=True, slots=True)
class Work:
    """What a client asked for, as it goes to the engines."""

    request: InferenceRequest
    body: Body
    headers: tuple[tuple[str, str], ...]


class LegFailed(Exception):
    """A leg failed on `target` in a way that it may not on another."""

    def __init__(self, target: Target, error: UpstreamError) -> None:
        super().__init__(str(error))
        self.target, self.error = target, error


class HandoffExpired(Exception):
    """The handoff grew too old, or one of its ends was restarted, before it could be sent."""


class _Ticket:
    """What becomes of one handoff. Once its bytes are on their way it is the decode engine's: that one pulls, and
    lets go when the pull is done or its client hangs up. A release beside it could free blocks that are being read."""

    def __init__(self, fresh: Callable[[], bool]) -> None:
        self._fresh = fresh
        self.result = HandoffResult.ABANDONED

    def send(self) -> None:
        """Called as the first byte is about to leave, the last moment at which it can still be kept back."""
        if not self._fresh():
            self.result = HandoffResult.EXPIRED
            raise HandoffExpired
        self.result = HandoffResult.SENT


class Legs:
    """Runs the legs of a placement and lets its leases go as they end. Raises LegFailed, HandoffExpired,
    UpstreamRefused."""

    def __init__(
        self,
        *,
        connector: KVConnector,
        client: EngineClient,
        fleet: Callable[[], Fleet],
        costs: CostModel,
        limits: LegLimits,
        observer: RouteObserver,
        clock: Clock,
    ) -> None:
        self._connector, self._client, self._fleet, self._costs = connector, client, fleet, costs
        self._limits, self._observer, self._clock = limits, observer, clock
        self._releases: set[asyncio.Task[None]] = set()

    async def open(self, work: Work, placement: Placement, attempt: AsyncExitStack) -> EngineResponse:
        """The decode leg's answer, ready to be passed on; `attempt` holds everything until it ends."""
        attempt.enter_context(placement)
        decision = placement.decision
        if decision.prefill is None or placement.handoff is None:
            body = self._connector.local_body(work.body, load_external=decision.path is not Path.RECOMPUTE)
            call = self._decode_call(work, decision.decode, body)
            response = await self._decode(decision.decode, call, attempt)
            placement.prefill.done()
            return response
        prefill, decode = self._instance(decision.prefill), self._instance(decision.decode)
        begun = self._connector.begin(work.request.id, prefill, decode)
        try:
            if self._connector.concurrent_legs:
                return await self._at_once(work, placement, begun, attempt)
            handoff = await self._prefill(work, placement, begun)
            return await self._send(work, placement, handoff, attempt)
        finally:
            placement.handoff.release()

    async def finish_releases(self) -> None:
        await asyncio.gather(*self._releases)

    # --- the legs ---

    async def _prefill(self, work: Work, placement: Placement, begun: Handoff) -> Handoff:
        target = placement.decision.prefiller
        call = EngineCall(
            path=work.request.endpoint,
            body=msgspec.json.encode(self._connector.prefill_body(work.body, begun)),
            headers=self._headers(work, target),
            head_limit_s=self._limits.prefill_s,
        )
        with placement.prefill:
            try:
                async with self._client.open(self._instance(target).url, call) as response:
                    answer = msgspec.json.decode(await response.read(), type=dict[str, object])
                handoff = self._connector.complete(begun, answer, self._clock.now_s())
            except UpstreamRefused:
                raise
            except UpstreamError as exc:
                raise LegFailed(target, exc) from exc
            except msgspec.MsgspecError as exc:
                error = UpstreamError(f"{target.instance} did not answer a prefill in JSON")
                raise LegFailed(target, error) from exc
            placement.prefill.done()
        if placement.handoff is not None:
            placement.handoff.answered()
        return handoff

    async def _send(
        self, work: Work, placement: Placement, handoff: Handoff, attempt: AsyncExitStack
    ) -> EngineResponse:
        """The decode leg of a finished prefill. The handoff is sent once, or released."""
        target = placement.decision.decode
        ticket = _Ticket(lambda: self._fresh(handoff) and self._young(handoff))
        refused = False
        sent_s = self._clock.now_s()
        pulled = self._pulled_unseen(placement) if not work.request.stream else None
        try:
            call = self._decode_call(work, target, self._connector.decode_body(work.body, handoff))
            response = await self._decode(target, dataclasses.replace(call, once=True, on_sent=ticket.send), attempt)
        except UpstreamRefused:
            # Refused by its schema, a request never gets to where the engine would tell the prefill.
            refused = True
            raise
        finally:
            if pulled is not None:
                pulled.cancel()
            self._observer.handoff(ticket.result)
            if refused or ticket.result is not HandoffResult.SENT:
                self._release(work, handoff)
        if work.request.stream:
            self._measure(placement, handoff.pair, self._clock.now_s() - sent_s)
        return response

    def _measure(self, placement: Placement, pair: Pair, seconds: float) -> None:
        """What the handoff took: the time to the first byte less the step that made it."""
        now_s = self._clock.now_s()
        step_s = self._costs.snapshot(now_s).of(placement.decision.decode).step_mean_s(1, 0)
        self._costs.handed_off(pair, placement.claim.link_bytes, max(0.0, seconds - step_s), now_s)

    def _pulled_unseen(self, placement: Placement) -> asyncio.Task[None]:
        """An unstreamed answer does not show when its KV was pulled: the link is taken for free again after well more
        than the predicted time."""

        async def let_go(handoff: HandoffLease) -> None:
            decision = placement.decision
            link = self._costs.snapshot(self._clock.now_s()).between(decision.prefiller, decision.decode)
            transfer_s = link.handoff_s + link.transfer_mean_s(placement.claim.link_bytes, 0)
            await self._clock.sleep(UNSEEN_PULL_S + UNSEEN_PULL_TIMES * transfer_s)
            handoff.release()

        assert placement.handoff is not None
        return asyncio.create_task(let_go(placement.handoff))

    async def _at_once(
        self, work: Work, placement: Placement, begun: Handoff, attempt: AsyncExitStack
    ) -> EngineResponse:
        """Both legs together, for connectors that name their ids beforehand. A prefill that fails ends the decode
        leg, which would wait for it; one that is still at it when the decode leg answers goes on beside it."""
        decode = placement.decision.decode
        prefilling = asyncio.create_task(self._prefill(work, placement, begun))
        attempt.push_async_callback(_end, prefilling)
        ticket = _Ticket(lambda: self._fresh(begun))
        call = self._decode_call(work, decode, self._connector.decode_body(work.body, begun))
        call = dataclasses.replace(call, once=True, on_sent=ticket.send)
        decoding = asyncio.create_task(self._decode(decode, call, attempt))
        try:
            await asyncio.wait({prefilling, decoding}, return_when=asyncio.FIRST_COMPLETED)
            if prefilling.done():
                prefilling.result()
            return await decoding
        finally:
            self._observer.handoff(ticket.result)
            await _end(decoding)

    async def _decode(self, target: Target, call: EngineCall, attempt: AsyncExitStack) -> EngineResponse:
        try:
            return await attempt.enter_async_context(self._client.open(self._instance(target).url, call))
        except UpstreamRefused:
            raise
        except UpstreamError as exc:
            raise LegFailed(target, exc) from exc

    def _decode_call(self, work: Work, target: Target, body: Body) -> EngineCall:
        limit_s = self._limits.first_byte_s if work.request.stream else self._limits.unary_s
        headers = self._headers(work, target)
        return EngineCall(work.request.endpoint, msgspec.json.encode(body), headers, head_limit_s=limit_s)

    def _headers(self, work: Work, target: Target) -> tuple[tuple[str, str], ...]:
        """With the rank where there is more than one: only then does an engine take the header."""
        if self._instance(target).dp_size == 1:
            return work.headers
        return (*work.headers, ("x-data-parallel-rank", str(target.dp_rank)))

    def _instance(self, target: Target) -> Instance:
        """Raises LegFailed for one that left the fleet since the decision."""
        instance = self._fleet().instances.get(target.instance)
        if instance is None:
            raise LegFailed(target, UpstreamError(f"{target.instance} has left the fleet"))
        return instance

    # --- the handoff's safety ---

    def _fresh(self, handoff: Handoff) -> bool:
        """Both ends are still the processes that were tested as a pair. From another prefill the handoff is worth
        nothing; another decode may have been started with another block size, and would answer 200 with wrong text."""
        fleet, pair = self._fleet(), handoff.pair
        prefill, decode = fleet.instances.get(pair.prefill), fleet.instances.get(pair.decode)
        return (
            prefill is not None
            and decode is not None
            and prefill.incarnation == handoff.prefill_incarnation
            and decode.incarnation == handoff.decode_incarnation
            and pair in fleet.pairs
            and fleet.pairs[pair].state is PairState.READY
        )

    def _young(self, handoff: Handoff) -> bool:
        """Past its lease a handoff is answered with another prompt's KV and HTTP 200; half the lease is the margin."""
        age_s = math.inf if handoff.answered_s is None else self._clock.now_s() - handoff.answered_s
        return age_s <= self._connector.lease_s / 2

    def _release(self, work: Work, handoff: Handoff) -> None:
        """Free the prefill's blocks now instead of at the end of the lease. Runs beside the request, which may
        already be cancelled."""
        release = self._connector.release_body(work.body.get("model"), handoff)
        if release is None:
            return
        body = msgspec.json.encode(release)
        call = EngineCall(RELEASE_ENDPOINT, body, work.headers, once=True, head_limit_s=RELEASE_LIMIT_S)
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
                    return
            except UpstreamRefused:
                return  # the refusal is what frees the blocks
            except UpstreamError as exc:
                log.warning("a handoff of %s could not be released through %s: %s", pair.prefill, decode.id, exc)
        log.warning("a handoff of %s stays until its lease ends", pair.prefill)


async def _end(task: asyncio.Task[Handoff] | asyncio.Task[EngineResponse]) -> None:
    """Cancelled if it still runs; its error, if it has one, has been told already."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

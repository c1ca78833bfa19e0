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
from disagg_router.interfaces import Clock, EngineCall, EngineClient, EngineResponse, KVConnector, RouteObserver
from disagg_router.model import (
    Body,
    Decision,
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
from disagg_router.routing.leases import LeaseBook, LeaseKind

log = logging.getLogger(__name__)

RELEASE_LIMIT_S = 5.0
RELEASE_ENDPOINT = "/v1/completions"


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
    """Holds the leases of a decision while its legs run. Raises LegFailed, HandoffExpired, UpstreamRefused."""

    def __init__(
        self,
        *,
        connector: KVConnector,
        client: EngineClient,
        fleet: Callable[[], Fleet],
        leases: LeaseBook,
        limits: LegLimits,
        observer: RouteObserver,
        clock: Clock,
    ) -> None:
        self._connector, self._client, self._fleet = connector, client, fleet
        self._leases, self._limits, self._observer, self._clock = leases, limits, observer, clock
        self._releases: set[asyncio.Task[None]] = set()

    async def open(self, work: Work, decision: Decision, attempt: AsyncExitStack) -> EngineResponse:
        """The decode leg's answer, ready to be passed on; `attempt` holds everything until it ends.

        Decode room is held before prefill compute is spent.
        """
        attempt.enter_context(self._leases.take(LeaseKind.DECODE, decision.decode))
        if decision.prefill is None:
            body = self._connector.local_body(work.body, load_external=decision.path is not Path.RECOMPUTE)
            return await self._decode(decision.decode, self._decode_call(work, body), attempt)
        prefill, decode = self._instance(decision.prefill), self._instance(decision.decode)
        begun = self._connector.begin(work.request.id, prefill, decode)
        with self._leases.take(LeaseKind.HANDOFF, decision.prefill):
            if self._connector.concurrent_legs:
                return await self._at_once(work, decision.prefill, decision.decode, begun, attempt)
            handoff = await self._prefill(work, decision.prefill, begun)
            return await self._send(work, decision.decode, handoff, attempt)

    async def finish_releases(self) -> None:
        await asyncio.gather(*self._releases)

    # --- the legs ---

    async def _prefill(self, work: Work, target: Target, begun: Handoff) -> Handoff:
        call = EngineCall(
            path=work.request.endpoint,
            body=msgspec.json.encode(self._connector.prefill_body(work.body, begun)),
            headers=work.headers,
            head_limit_s=self._limits.prefill_s,
        )
        with self._leases.take(LeaseKind.PREFILL, target):
            try:
                async with self._client.open(self._instance(target).url, call) as response:
                    answer = msgspec.json.decode(await response.read(), type=dict[str, object])
                return self._connector.complete(begun, answer, self._clock.now_s())
            except UpstreamRefused:
                raise
            except UpstreamError as exc:
                raise LegFailed(target, exc) from exc
            except msgspec.MsgspecError as exc:
                error = UpstreamError(f"{target.instance} did not answer a prefill in JSON")
                raise LegFailed(target, error) from exc

    async def _send(self, work: Work, target: Target, handoff: Handoff, attempt: AsyncExitStack) -> EngineResponse:
        """The decode leg of a finished prefill. The handoff is sent once, or released."""
        ticket = _Ticket(lambda: self._fresh(handoff) and self._young(handoff))
        call = self._decode_call(work, self._connector.decode_body(work.body, handoff))
        refused = False
        try:
            return await self._decode(target, dataclasses.replace(call, once=True, on_sent=ticket.send), attempt)
        except UpstreamRefused:
            # Refused by its schema, a request never gets to where the engine would tell the prefill.
            refused = True
            raise
        finally:
            self._observer.handoff(ticket.result)
            if refused or ticket.result is not HandoffResult.SENT:
                self._release(work, handoff)

    async def _at_once(
        self, work: Work, prefill: Target, decode: Target, begun: Handoff, attempt: AsyncExitStack
    ) -> EngineResponse:
        """Both legs together, for connectors that name their ids beforehand. A prefill that fails ends the decode
        leg, which would wait for it; one that is still at it when the decode leg answers goes on beside it."""
        prefilling = asyncio.create_task(self._prefill(work, prefill, begun))
        attempt.push_async_callback(_end, prefilling)
        ticket = _Ticket(lambda: self._fresh(begun))
        call = self._decode_call(work, self._connector.decode_body(work.body, begun))
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

    def _decode_call(self, work: Work, body: Body) -> EngineCall:
        limit_s = self._limits.first_byte_s if work.request.stream else self._limits.unary_s
        return EngineCall(work.request.endpoint, msgspec.json.encode(body), work.headers, head_limit_s=limit_s)

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

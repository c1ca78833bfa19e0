"""One engine's KV events over ZMQ: in order, gaps replayed, and a Reset wherever the story has a hole.

vLLM's protocol (0.32, distributed/kv_events.py): PUB sends [topic, sequence, payload]; to [b"", first sequence] its
replay socket answers [b"", topic, sequence, payload] for all it still has, then an end mark.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from disagg_router.engines.kv_wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    RankEvent,
    Reset,
    ResetReason,
    feed,
)
from disagg_router.errors import UpstreamError
from disagg_router.model import Instance, Target
from disagg_router.routing.prefix_index import PrefixIndex

_END = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """A catch-up takes at most `rounds` replays of `replay_s` each; a round keeps at most `round_bytes`."""

    replay_s: float = 5.0
    rounds: int = 16
    round_bytes: int = 32 * 1024 * 1024
    quiet_s: float = 30.0  # after that the engine is asked whether the last message got lost
    queue_messages: int = 10_000
    message_bytes: int = 16 * 1024 * 1024


@dataclass(slots=True)
class StreamStats:
    """Counters for metrics."""

    batches: int = 0
    replayed: int = 0  # batches that only a replay brought
    gaps: int = 0
    resets: int = 0
    malformed: int = 0  # messages, and single events inside sound ones
    unanswered: int = 0  # replays without an end


class _Payload(msgspec.Struct, array_like=True):
    """What follows (the publisher's own rank) is left alone."""

    ts: float
    events: list[msgspec.Raw]


@dataclass(frozen=True, slots=True)
class _Batch:
    sequence: int
    raw: bytes
    payload: _Payload


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """vLLM's own rule: rank r publishes at port + r.

    Raises UpstreamError when there is no port to count from.
    """
    base, _, port = endpoint.rpartition(":")
    if not (base and port.isascii() and port.isdecimal()):
        raise UpstreamError(f"{endpoint!r} is no tcp://host:port")
    return f"{base}:{int(port) + dp_rank}"


class KVEventStream:
    """The events of one (engine, data-parallel rank).

    Two things cannot be seen here: a restarted engine whose first message heard has the very number expected, and
    removals inside a message that cannot be read. The first ends with the instance's incarnation: whoever follows
    it starts a new stream.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None,
        context: zmq.asyncio.Context,
        dp_rank: int = 0,
        limits: StreamLimits | None = None,
    ) -> None:
        """Endpoints are rank 0's. Raises UpstreamError when they are no tcp://host:port."""
        self._endpoint = rank_endpoint(endpoint, dp_rank)
        self._replay_endpoint = rank_endpoint(replay_endpoint, dp_rank) if replay_endpoint else None
        self._context, self._rank, self._limits = context, dp_rank, limits or StreamLimits()
        self._decoder = msgspec.msgpack.Decoder(_Payload)
        self._event_decoder = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
        self._last: _Batch | None = None  # the newest one told
        self.stats = StreamStats()

    async def events(self) -> AsyncGenerator[RankEvent, None]:
        """Without end; close it (contextlib.aclosing) to close its sockets. Raises UpstreamError when the endpoint
        cannot be subscribed to, and nothing for what arrives there."""
        with self._socket(zmq.SUB, self._endpoint, self._limits.queue_messages) as subscriber:
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")  # before the first replay, so that nothing falls between
            yield self._reset(ResetReason.STARTED)
            async for told in self._catch_up():
                yield told
            while True:
                frames = await _receive(subscriber, self._limits.quiet_s)
                if frames is None:
                    async for told in self._catch_up():
                        yield told
                elif batch := self._read(frames):
                    async for told in self._live(batch):
                        yield told

    async def _live(self, batch: _Batch) -> AsyncGenerator[RankEvent, None]:
        last = self._last
        if last and batch.sequence <= last.sequence:
            if batch.payload.ts <= last.payload.ts:
                return  # a replay has brought it already
            yield self._reset(ResetReason.RESTARTED)
        if batch.sequence != self._expected:
            self.stats.gaps += 1
            async for told in self._catch_up():
                yield told
            if self._last and batch.sequence < self._expected:
                return
            if self._last and batch.sequence > self._expected:
                yield self._reset(ResetReason.GAP)
        for told in self._tell(batch):
            yield told

    async def _catch_up(self) -> AsyncGenerator[RankEvent, None]:
        """Everything the engine still has beyond the last batch told.

        That one is asked for as well: only if it comes back the same does the process that published it still run,
        with its history complete from there on.
        """
        for _ in range(self._limits.rounds):
            last = self._last
            batches, ended = await self._replay(last.sequence if last else 0)
            if last and (batches or ended):
                if batches and batches[0].sequence == last.sequence and batches[0].raw == last.raw:
                    del batches[0]
                else:
                    lost = batches and batches[0].sequence > last.sequence
                    yield self._reset(ResetReason.GAP if lost else ResetReason.RESTARTED)
                    continue
            whole = ended
            for batch in batches:
                if self._last and batch.sequence != self._expected:
                    whole = False  # vLLM's socket drops what does not fit its queue: ask again from here
                    break
                self.stats.replayed += 1
                for told in self._tell(batch):
                    yield told
            if whole or not batches:
                return

    async def _replay(self, first: int) -> tuple[list[_Batch], bool]:
        """Batches from `first` on, and whether these are all: False when a limit came first."""
        batches: list[_Batch] = []
        room_bytes = self._limits.round_bytes
        if self._replay_endpoint is None:
            return batches, False
        with self._socket(zmq.DEALER, self._replay_endpoint, 0) as dealer:
            try:
                async with asyncio.timeout(self._limits.replay_s):
                    await dealer.send_multipart([b"", first.to_bytes(8, "big")])
                    while room_bytes > 0:
                        frames = await _receive(dealer, self._limits.replay_s)
                        if frames is None:
                            break
                        if len(frames) == 4 and frames[2] == _END:
                            return batches, True
                        if batch := self._read(frames[1:], replayed=True):
                            batches.append(batch)
                            room_bytes -= len(batch.raw)
            except TimeoutError:
                pass
        self.stats.unanswered += room_bytes > 0
        return batches, False

    @property
    def _expected(self) -> int:
        return self._last.sequence + 1 if self._last else 0

    def _read(self, frames: list[bytes], *, replayed: bool = False) -> _Batch | None:
        """An unreadable payload in its right place stands as an empty batch, or it would look like a gap."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self.stats.malformed += 1
            return None
        sequence, raw = int.from_bytes(frames[1], "big"), frames[2]
        try:
            return _Batch(sequence, raw, self._decoder.decode(raw))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.stats.malformed += 1
            if not replayed and sequence != self._expected:
                return None
            return _Batch(sequence, raw, _Payload(self._last.payload.ts if self._last else 0.0, []))

    def _tell(self, batch: _Batch) -> list[RankEvent]:
        self._last = batch
        self.stats.batches += 1
        told = []
        for raw in batch.payload.events:
            try:
                told.append(RankEvent(self._rank, self._event_decoder.decode(raw)))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.stats.malformed += 1
        return told

    def _reset(self, reason: ResetReason) -> RankEvent:
        self._last = None
        self.stats.resets += 1
        return RankEvent(self._rank, Reset(reason))

    def _socket(self, kind: int, endpoint: str, queue_messages: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, queue_messages)
        socket.setsockopt(zmq.MAXMSGSIZE, self._limits.message_bytes)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)  # else a peer that vanished is waited for until TCP gives up
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as exc:
            socket.close()
            raise UpstreamError(f"{endpoint!r} cannot be subscribed to") from exc
        return socket


async def _receive(socket: zmq.asyncio.Socket, limit_s: float) -> list[bytes] | None:
    await asyncio.sleep(0)  # a waiting message is had without suspending: a flood must not hold the loop
    if not await socket.poll(int(limit_s * 1000)):
        return None
    return await socket.recv_multipart()


async def follow_kv_events(instance: Instance, *, index: PrefixIndex) -> None:
    """Feed `index` with what every data-parallel rank of the instance tells, until cancelled. Raises UpstreamError when
    an endpoint cannot be subscribed to; then no rank is followed any more."""
    if instance.kv_events is None:
        return
    with zmq.asyncio.Context() as context:
        streams = [
            KVEventStream(instance.kv_events, replay_endpoint=instance.kv_replay, context=context, dp_rank=rank)
            for rank in range(instance.dp_size)
        ]
        try:
            async with asyncio.TaskGroup() as ranks:
                for stream in streams:
                    ranks.create_task(_feed_all(stream, instance, index))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None


async def _feed_all(stream: KVEventStream, instance: Instance, index: PrefixIndex) -> None:
    async with contextlib.aclosing(stream.events()) as events:
        async for told in events:
            feed(index, Target(instance.id, told.dp_rank), told.event)

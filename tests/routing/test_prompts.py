"""How a request gets its count, and what each target holds of it."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from disagg_router.engines.tokenize import tokenize_bodies
from disagg_router.errors import UpstreamError, UpstreamRefused
from disagg_router.model import Target
from disagg_router.routing.checked_tokenizer import Kind
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.prefix_index import PrefixIndex
from disagg_router.routing.prompts import GUESSED_BLOCK_SIZE, PromptReader, adapter_of
from disagg_router.routing.routed_prefixes import RoutedPrefixes
from disagg_router.routing.token_hashes import chain
from tests.builders import FINGERPRINT, instance, request, target

TOLD = instance("d0", kv_events="tcp://d0:5557")
SILENT = instance("d1")
IDS = list(range(100))


class FakeLocal:
    """Reads texts as their lengths, of which it says so beforehand."""

    def __init__(self, *, fails=False):
        self.tokenizer, self.fails = self, fails
        self.mismatches, self.failed_checks = {Kind.CHAT: 1, Kind.COMPLETION: 0}, 2

    async def prompt(self, body):
        _, asked = tokenize_bodies(body)
        return asked[0]["prompt"] if asked and isinstance(asked[0].get("prompt"), str) else None

    async def ids(self, text):
        if self.fails:
            raise ValueError
        return list(range(len(text)))

    def at_most_tokens(self, text):
        return len(text) if text.isascii() else None


class World:
    def __init__(self, *instances, routed=False, **given):
        self.asked, self.errors, self.failed = [], {}, []
        self.index, self.now_s = PrefixIndex(1000), 0.0
        self.fleet = Fleet({i.id: i for i in instances or (TOLD,)})
        self.requests = {}
        engine: Any = self
        self.reader = PromptReader(
            client=engine,
            fleet=lambda: self.fleet,
            index=self.index,
            requests_on=lambda where: self.requests.get(where, 0),
            failed=lambda where, _: self.failed.append(where),
            rng=random.Random(0),
            routed=RoutedPrefixes(lambda: self.now_s) if routed else None,
            **given,
        )

    async def tokenize(self, url, body):
        name = url.removeprefix("http://").partition(":")[0]
        self.asked.append(name)
        if name in self.errors:
            raise self.errors[name]
        return IDS

    def store(self, where, ids, **named):
        blocks = len(ids) // 32
        self.index.stored(where, list(range(blocks)), None, ids[: blocks * 32], 32, **named)

    async def read(self, body=None, **changes):
        body = {"prompt": "x"} if body is None else body
        return await self.reader.read(request(**changes), body)


# --- counting -------------------------------------------------------------------------------------------------


async def test_the_least_busy_engine_is_asked():
    """Every engine of a model has the same tokenizer."""
    world = World(TOLD, SILENT)
    world.requests = {target("d0"): 3, target("d1"): 1}
    assert (await world.read()).prompt_tokens == 100
    assert world.asked == ["d1"]


async def test_an_engine_that_fails_is_told_and_another_one_asked():
    """When both fail the request goes on without a count."""
    world = World(TOLD, SILENT)
    world.requests = {target("d1"): 1}
    world.errors = {"d0": UpstreamError("down")}
    assert (await world.read()).prompt_tokens == 100
    world.errors["d1"] = UpstreamError("down")
    assert (await world.read()).prompt_tokens is None
    assert world.failed == [target("d0"), target("d0"), target("d1")]
    stats = world.reader.stats()
    assert (stats.engine, stats.failed) == (1, 1)


async def test_a_prompt_that_the_engine_refuses_is_refused():
    """With its answer."""
    world = World()
    world.errors = {"d0": UpstreamRefused(400, "application/json", b"{}")}
    with pytest.raises(UpstreamRefused):
        await world.read()


async def test_what_is_read_here_costs_no_trip():
    """And what is not goes to the engine as before."""
    world = World(local=FakeLocal())
    assert (await world.read({"prompt": "abcde"})).prompt_tokens == 5
    assert world.asked == []
    chat = {"messages": [], "prompt": "beside the point"}
    assert (await world.read(chat, endpoint="/v1/chat/completions")).prompt_tokens == 100
    assert world.asked == ["d0"]
    stats = world.reader.stats()
    assert (stats.local, stats.engine, stats.mismatches[Kind.CHAT], stats.failed_checks) == (1, 1, 1, 2)


async def test_a_local_tokenizer_that_fails_is_counted(caplog):
    """The engine is asked instead."""
    world = World(local=FakeLocal(fails=True))
    assert (await world.read({"prompt": "abcde"})).prompt_tokens == 100
    stats = world.reader.stats()
    assert (stats.local, stats.local_failed, stats.engine) == (0, 1, 1)


@pytest.mark.parametrize(
    ("text", "counted"), [("a" * 9, None), ("a" * 10, 10), ("é" * 4, 4)], ids=["fewer", "as many", "no bound"]
)
async def test_a_surely_short_prompt_is_left_without_a_count(text, counted):
    """Only where its bytes decide; a bound is never shown as a count."""
    world = World(local=FakeLocal(), count_from_tokens=10)
    assert (await world.read({"prompt": text})).prompt_tokens == counted
    assert world.reader.stats().skipped == (counted is None)


# --- what is cached -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ids", "cached"), [(IDS, 96), (IDS[:64], 64), (IDS[:20], None)])
async def test_the_index_says_what_a_target_holds(ids, cached):
    """In whole blocks."""
    world = World()
    world.store(target("d0"), ids)
    assert (await world.read()).cached_tokens.get(target("d0")) == cached


async def test_every_rank_has_a_cache_of_its_own():
    """As its own target."""
    world = World(instance("d0", kv_events="tcp://d0:5557", dp_size=2))
    world.store(Target(TOLD.id, 1), IDS[:64])
    assert (await world.read()).cached_tokens == {Target(TOLD.id, 1): 64}


@pytest.mark.parametrize(
    ("model", "cached"), [("pirate", {target("d0"): 96}), ("tiny", {target("d1"): 96}), ("other", {target("d1"): 96})]
)
async def test_an_adapter_has_blocks_of_its_own(model, cached):
    """The same tokens under an adapter are other KV."""
    world = World(lora_of=lambda body: adapter_of(body, {"pirate"}))
    world.store(target("d0"), IDS, lora="pirate")
    world.store(target("d1"), IDS)
    assert (await world.read({"model": msgspec.Raw(msgspec.json.encode(model)), "prompt": "x"})).cached_tokens == cached


async def test_a_silent_instance_is_guessed_by_what_was_sent_there():
    """In whole blocks, and without the last token, which is always computed."""
    world = World(TOLD, SILENT, routed=True)
    first = await world.read(id="r1")
    assert first.cached_tokens == {}
    world.reader.served("r1", [target("d1")])
    assert (await world.read(id="r2")).cached_tokens == {target("d1"): 96}


async def test_what_an_instance_tells_wins():
    """No guess is made for one that publishes its events."""
    world = World(TOLD, SILENT, routed=True)
    await world.read(id="r1")
    world.reader.served("r1", [target("d0"), target("d1")])
    world.store(target("d0"), IDS[:32])
    assert (await world.read(id="r2")).cached_tokens == {target("d0"): 32, target("d1"): 96}


async def test_an_instance_that_hides_its_block_size_is_guessed_with_vllms():
    """Only guessed ones: the exact index needs the size."""
    hidden = instance("d1", fingerprint=type(FINGERPRINT)())
    world = World(hidden, routed=True)
    await world.read(id="r1")
    world.reader.served("r1", [target("d1")])
    expected = (len(IDS) - 1) // GUESSED_BLOCK_SIZE * GUESSED_BLOCK_SIZE
    assert (await world.read(id="r2")).cached_tokens == {target("d1"): expected}


@pytest.mark.parametrize("where", [target("gone"), target("d1")])
async def test_served_without_having_been_read_is_nothing(where):
    """Nor is a target that has left, nor a second time."""
    world = World(SILENT, routed=True)
    world.reader.served("never", [where])
    await world.read(id="r1")
    world.reader.served("r1", [target("gone")])
    world.reader.served("r1", [where])
    assert (await world.read(id="r2")).cached_tokens == {}


def test_the_chain_of_an_adapter_and_a_salt_is_its_own():
    """Four different names for the same tokens."""
    keys = {chain(IDS, 32, salt=salt, lora=lora)[0] for salt in (None, "s") for lora in (None, "l")}
    assert len(keys) == 4

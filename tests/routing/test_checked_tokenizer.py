"""The local tokenizer is trusted as far as an engine gave the same ids."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import Any

import pytest

from disagg_router.errors import UpstreamError, UpstreamRefused
from disagg_router.model import InstanceState
from disagg_router.routing.checked_tokenizer import RETRY_S, CheckedTokenizer, Kind
from disagg_router.routing.model_folder import load_tokenizer
from tests.builders import instance
from tests.fakes.clock import FakeClock, settle
from tests.routing.chat_templates import QWEN_LIKE
from tests.routing.tiny_tokenizers import byte_level, write

CHAT = {"messages": [{"role": "user", "content": "the prompt"}]}
TEXT = {"prompt": "the prompt"}


class World:
    """An engine with the same files, and what it does otherwise."""

    def __init__(self, folder):
        self.tokenizer, self.clock = load_tokenizer(folder), FakeClock()
        engine: Any = self
        self.checked = CheckedTokenizer(self.tokenizer, engine, served_name="m", clock=self.clock)
        self.asked, self.wrong, self.refused, self.down = [], set(), set(), False

    async def tokenize(self, url, body):
        self.asked.append(url)
        kind = Kind.CHAT if "messages" in body else Kind.COMPLETION
        if self.down:
            raise UpstreamError("gone")
        if kind in self.refused:
            raise UpstreamRefused(400, "application/json", b"{}")
        prompt = await self.tokenizer.prompt(body)
        assert prompt is not None
        ids = await self.tokenizer.ids(prompt)
        return [*ids, 7] if kind in self.wrong else [*ids]

    async def see(self, *instances):
        self.checked.update({i.id: i for i in instances}, self.group)
        for _ in range(50):  # a longer text is tokenized in a thread
            await settle()
            await asyncio.sleep(0.001)

    def trusted(self):
        return {kind for kind in Kind if self.checked.trusts(kind)}

    @asynccontextmanager
    async def open(self):
        async with asyncio.TaskGroup() as self.group:
            yield self


@pytest.fixture
async def world(tmp_path):
    async with World(write(tmp_path, byte_level(), QWEN_LIKE)).open() as world:
        yield world


async def test_until_an_engine_was_seen_only_token_ids_are_read(world):
    """They are what they are."""
    assert await world.checked.prompt(TEXT) is None
    assert await world.checked.prompt(CHAT) is None
    assert await world.checked.prompt({"prompt": [1, 2]}) is not None


async def test_equal_ids_make_trust(world):
    """For texts and for chats."""
    await world.see(instance("d0"))
    assert world.trusted() == {Kind.COMPLETION, Kind.CHAT}
    assert len(world.asked) >= 20
    assert await world.checked.prompt(TEXT) is not None
    assert await world.checked.prompt(CHAT) is not None


@pytest.mark.parametrize(("wrong", "right"), [(Kind.CHAT, Kind.COMPLETION), (Kind.COMPLETION, Kind.CHAT)])
async def test_a_mismatch_ends_it_for_its_kind(world, caplog, wrong, right):
    """With one warning, and a count."""
    world.wrong = {wrong}
    with caplog.at_level(logging.WARNING):
        await world.see(instance("d0"))
    assert world.trusted() == {right}
    assert len(caplog.records) == 1
    assert world.checked.mismatches == {wrong: 1}


async def test_a_kind_that_the_engine_refuses_is_not_trusted(world):
    """It has no chat template, so nothing was compared."""
    world.refused = {Kind.CHAT}
    await world.see(instance("d0"))
    assert world.trusted() == {Kind.COMPLETION}


async def test_a_check_that_fails_is_tried_again(world):
    """Until then the engine is asked."""
    world.down = True
    await world.see(instance("d0"))
    assert (world.trusted(), world.checked.failed_checks) == (set(), 1)
    world.down = False
    await world.clock.advance(RETRY_S)
    await world.see(instance("d0"))
    assert world.trusted() == {Kind.COMPLETION, Kind.CHAT}


async def test_one_process_is_asked_once(world):
    """However often it is seen, and whatever others there are; another one when it is gone."""
    first = instance("d0")
    await world.see(first)
    asked = len(world.asked)
    await world.see(first, instance("d1"))
    assert len(world.asked) == asked
    world.wrong = {Kind.CHAT}
    await world.see(instance("d0", incarnation="d0-second"), instance("d1", state=InstanceState.STARTING))
    assert len(world.asked) > asked
    assert world.trusted() == {Kind.COMPLETION}

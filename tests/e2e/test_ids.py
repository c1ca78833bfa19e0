"""Token ids made in the router are the engine's own, for every shape of request and for conversations that grow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec
import pytest

from disagg_router.engines.client import VllmClient
from disagg_router.errors import NotUnderstood
from disagg_router.routing.checked_tokenizer import CheckedTokenizer, Kind
from disagg_router.routing.clock import MonotonicClock
from disagg_router.routing.local_tokenizer import LocalTokenizer
from disagg_router.routing.model_folder import load_tokenizer
from disagg_router.routing.request_shapes import request_shapes
from tests.builders import instance
from tests.e2e.serving import ROOT, Serving

pytestmark = pytest.mark.engine

SHAPES = request_shapes("tiny")
WORDS = ["the prompt's keys", " and\n\n", "Zürich ", "你好", "🙂", "<s>", "  ", '{"a": 1.0}', "", "1234567"]


@pytest.fixture(scope="module")
def tokenizer() -> LocalTokenizer:
    return load_tokenizer(ROOT / "model")


async def both(cluster: Serving, tokenizer: LocalTokenizer, body: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    raw = {key: msgspec.Raw(msgspec.json.encode(value)) for key, value in body.items()}
    prompt = await tokenizer.prompt(raw)
    if prompt is None:
        raise NotUnderstood
    client = VllmClient()
    try:
        return list(await tokenizer.ids(prompt)), await client.tokenize(cluster.instance("decode")["url"], raw)
    finally:
        await client.close()


@pytest.mark.parametrize("name", SHAPES)
async def test_a_shape_has_the_engines_ids(cluster, tokenizer, name):
    """As its /tokenize says."""
    ours, theirs = await both(cluster, tokenizer, SHAPES[name])
    assert ours == theirs


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_prompt_that_the_engine_generates_from(cluster, tokenizer, name):
    """/tokenize is another endpoint: what counts are the ids that the generation itself reports."""
    body = SHAPES[name] | {"max_tokens": 1, "return_token_ids": True}
    if "tools" in body:
        body |= {"tool_choice": "none"}
    path = "chat/completions" if "messages" in body else "completions"
    url = f"{cluster.instance('decode')['url']}/v1/{path}"
    answer = httpx.post(url, json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    theirs = told.get("prompt_token_ids") or told["choices"][0]["prompt_token_ids"]

    async def ours() -> list[int]:
        prompt = await tokenizer.prompt(SHAPES[name])
        assert prompt is not None
        return list(await tokenizer.ids(prompt))

    assert asyncio.run(ours()) == theirs


async def test_random_conversations_have_the_engines_ids(cluster, tokenizer):
    """Turn by turn, with tools now and then."""
    rng = random.Random(3)
    for _ in range(10):
        messages: list[dict[str, Any]] = []
        for _ in range(4):
            said = ["".join(rng.choices(WORDS, k=rng.randrange(60))) for _ in range(2)]
            messages += [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]
            asked = {"model": "tiny", "messages": messages[: rng.randrange(1, len(messages) + 1)]}
            if rng.random() < 0.3:
                asked["tools"] = SHAPES["chat: tools"]["tools"]
            ours, theirs = await both(cluster, tokenizer, asked)
            assert ours == theirs


async def test_the_check_at_registration_trusts_both_kinds(cluster, tokenizer):
    """With the engine's /tokenize behind it."""
    client = VllmClient()
    checked = CheckedTokenizer(tokenizer, client, served_name="tiny", clock=MonotonicClock())
    decode = instance("d0", url=cluster.instance("decode")["url"])
    async with asyncio.TaskGroup() as group:
        checked.update({decode.id: decode}, group)
    await client.close()
    assert checked.trusts(Kind.COMPLETION)
    assert checked.trusts(Kind.CHAT)

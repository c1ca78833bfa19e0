"""The router knows what an engine holds: its prediction is the engine's own count of cached tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from disagg_router.routing.request_shapes import request_shapes
from tests.e2e.serving import Serving, cluster_config, running

pytestmark = pytest.mark.engine

HISTORY = "Prefill computes the prompt's keys and values once. " * 12
SHAPES = request_shapes("tiny") | {"a salt": {"model": "tiny", "prompt": HISTORY, "cache_salt": "tenant-a"}}
PULLED_SHAPES = ("text", "token ids", "a salt", "chat: tools", "chat: several turns", "chat: content parts")
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
CONTINUES = {"add_generation_prompt", "continue_final_message"}  # a turn that is added makes these untrue
Json = dict[str, Any]


def first_turn(name: str) -> Json:
    """A request of that shape after something long that nobody has cached."""
    shape, fresh = SHAPES[name] | GREEDY, f"{name} {time.monotonic()} {HISTORY}"
    if "tools" in shape:
        shape |= {"tool_choice": "none"}
    if "messages" in shape:
        return shape | {"messages": [{"role": "system", "content": fresh}, *shape["messages"]]}
    if isinstance(shape["prompt"], str):
        return shape | {"prompt": fresh + shape["prompt"]}
    return shape | {"prompt": [3 + ord(letter) % 90 for letter in fresh] + shape["prompt"]}


def next_turn(first: Json, answer: Json) -> Json:
    """The conversation with its answer, and something new."""
    choice = answer["choices"][0]
    if "messages" in first:
        said = {"role": "assistant", "content": choice["message"]["content"]}
        asked = {"role": "user", "content": "And then?"}
        kept = {key: value for key, value in first.items() if key not in CONTINUES}
        return kept | {"messages": [*first["messages"], said, asked]}
    if isinstance(first["prompt"], str):
        return first | {"prompt": f"{first['prompt']}{choice['text']} And then?"}
    return first | {"prompt": [*first["prompt"], *range(3, 43)]}


def would_compute(cluster: Serving, body: Json, term: str) -> int:
    """Tokens that the router would have the engine compute, as it would decide now."""
    shown = httpx.post(f"{cluster.admin_url}/debug/route", json=body, timeout=10, trust_env=False, verify=False).json()
    return int(shown["terms"][term])


def settled(cluster: Serving, body: Json, term: str) -> int:
    """`would_compute` once the engine's events have told of what it has just stored."""
    found, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < 0.4:
        if (now := would_compute(cluster, body, term)) != found:
            found, since_s = now, time.monotonic()
        time.sleep(0.05)
    return found


def send(cluster: Serving, body: Json, path: str | None = None) -> httpx.Response:
    endpoint = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    headers = {"x-disagg-path": path} if path else {}
    answer = httpx.post(cluster.url + endpoint, json=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("name", PULLED_SHAPES)
def test_c14_the_next_turn_finds_what_was_pulled(cluster, name):
    """Whole blocks of the first turn; the second stays on the engine that holds them, since little of it is new."""
    first = first_turn(name)
    answer = send(cluster, first)
    assert answer.headers["x-disagg-path"] == "remote_prefill"
    second = next_turn(first, answer.json())
    uncached = settled(cluster, second, "uncached_tokens")
    before = cluster.prompt_tokens("decode-0")
    answer = send(cluster, second)
    assert answer.headers["x-disagg-path"] == "local"
    counted = {source: tokens - before[source] for source, tokens in cluster.prompt_tokens("decode-0").items()}
    cached = answer.json()["usage"]["prompt_tokens"] - uncached
    assert cached > 0
    assert counted == {"local_compute": uncached, "local_cache_hit": cached, "external_kv_transfer": 0}


def test_another_salt_finds_nothing(cluster):
    """Tenants do not see each other's caches, and the router does not promise that they would."""
    body = {"model": "tiny", "max_tokens": 2, "prompt": f"{time.monotonic()} {HISTORY}", "cache_salt": "one"}
    send(cluster, body, "local")
    assert settled(cluster, body, "uncached_tokens") < 256
    assert would_compute(cluster, body | {"cache_salt": "two"}, "uncached_tokens") > 600
    unsalted = {key: value for key, value in body.items() if key != "cache_salt"}
    assert would_compute(cluster, unsalted, "uncached_tokens") > 600


# --- two instances, either of which may hold a conversation -----------------------------------------------------------


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    args = "max-model-len: 8192, block-size: 32, enable-prompt-tokens-details: true"
    router = "policy: {name: break_even, sampled: 0}"  # a path that is tried for its own sake is no news here
    config = cluster_config("pools: {unified: {instances: 2}}", router, args)
    with running(tmp_path_factory.mktemp("twins"), config) as serving:
        yield serving


def by_the_engine(answer: httpx.Response) -> tuple[int, int]:
    """Prompt tokens, and how many of them it had cached."""
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_the_next_turn_goes_where_the_conversation_is(twins, name):
    """And the engine there has cached just what the index said, answer included; so too when a turn is sent again."""
    first = first_turn(name)
    answer = send(twins, first)
    holder = answer.headers["x-disagg-decode"]
    for body in (next_turn(first, answer.json()), first):
        uncached = settled(twins, body, "local_uncached_tokens")
        again = send(twins, body)
        assert (again.headers["x-disagg-path"], again.headers["x-disagg-decode"]) == ("local", holder)
        prompt_tokens, cached_tokens = by_the_engine(again)
        assert cached_tokens == prompt_tokens - uncached > 0


@pytest.mark.long
@pytest.mark.parametrize(("prompt_tokens", "cached_tokens"), [(31, 0), (32, 0), (33, 32), (64, 32), (65, 64)])
def test_the_last_token_is_always_computed(twins, prompt_tokens, cached_tokens):
    """Its logits make the first token of the answer, so of a prompt of whole blocks all but the last is used."""
    start = 3 + int(time.monotonic() * 1000) % 200
    body = {"model": "tiny", "prompt": [start, *range(4, 3 + prompt_tokens)], **GREEDY, "max_tokens": 1}
    send(twins, body)
    assert prompt_tokens - settled(twins, body, "local_uncached_tokens") == cached_tokens
    assert by_the_engine(send(twins, body)) == (prompt_tokens, cached_tokens)

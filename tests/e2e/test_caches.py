"""The router knows what the decode engine holds: its prediction is the engine's own count of cached tokens."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.e2e.serving import Serving, engine_counter

pytestmark = pytest.mark.engine

HISTORY = "Prefill computes the prompt's keys and values once. " * 12
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": {"type": "object", "properties": {}}},
}
USER = {"role": "user", "content": HISTORY}
SHAPES: dict[str, dict] = {
    "text": {"prompt": HISTORY},
    "token ids": {"prompt": [3 + (i * i) % 90 for i in range(700)]},
    "chat": {"messages": [USER]},
    "chat with a system prompt": {"messages": [{"role": "system", "content": "Be brief. " * 20}, USER]},
    "chat with tools": {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
    "chat of several turns": {"messages": [USER, {"role": "assistant", "content": "Yes."}, USER]},
    "content parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": HISTORY}]}]},
    "template kwargs": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "a salt": {"prompt": HISTORY, "cache_salt": "tenant-a"},
}


def grown(shape: dict, by: str) -> dict:
    """The same request with something new at its end: the next turn of a conversation."""
    if "messages" in shape:
        turn = [{"role": "assistant", "content": "So it is."}, {"role": "user", "content": by}]
        return shape | {"messages": [*shape["messages"], *turn]}
    prompt = shape["prompt"]
    return shape | {"prompt": prompt + by if isinstance(prompt, str) else [*prompt, *range(3, 43)]}


def predicted(cluster: Serving, body: dict) -> int:
    """Tokens the decode engine would have to compute, as the router would decide now."""
    shown = httpx.post(f"{cluster.admin_url}/debug/route", json=body, timeout=10, trust_env=False).json()
    return int(shown["terms"]["uncached_tokens"])


def send(cluster: Serving, body: dict, path: str | None = None) -> httpx.Response:
    endpoint = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    headers = {"x-disagg-path": path} if path else {}
    answer = httpx.post(cluster.url + endpoint, json=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("name", SHAPES)
def test_c14_the_next_turn_finds_what_the_index_says(cluster, name):
    """Whole blocks of the first turn; the second stays on the engine that holds them, since little of it is new."""
    shape = {"model": "tiny", "max_tokens": 2, "temperature": 0} | SHAPES[name]
    marker = f"{name} {time.monotonic()}"  # nothing of an earlier run is cached
    if "messages" in shape:
        first = shape | {"messages": [{"role": "user", "content": marker}, *shape["messages"]]}
    elif isinstance(shape["prompt"], str):
        first = shape | {"prompt": marker + shape["prompt"]}
    else:
        first = shape | {"prompt": [3 + ord(c) % 90 for c in marker] + shape["prompt"]}
    assert send(cluster, first).headers["x-disagg-path"] == "remote_prefill"
    second = grown(first, " And then?")
    deadline = time.monotonic() + 10
    whole = predicted(cluster, second)
    while (uncached := predicted(cluster, second)) >= 256:
        assert time.monotonic() < deadline, (uncached, whole)
        time.sleep(0.05)
    url = cluster.instance("decode")["url"]
    by_source = "vllm:prompt_tokens_by_source_total"
    before = {s: engine_counter(url, by_source, source=s) for s in ("local_compute", "local_cache_hit")}
    answer = send(cluster, second)
    assert answer.headers["x-disagg-path"] == "local"
    computed, hit = (engine_counter(url, by_source, source=s) - before[s] for s in ("local_compute", "local_cache_hit"))
    assert (computed, hit + computed) == (uncached, answer.json()["usage"]["prompt_tokens"])


def test_another_salt_finds_nothing(cluster):
    """Tenants do not see each other's caches, and the router does not promise that they would."""
    body = {"model": "tiny", "max_tokens": 2, "prompt": f"{time.monotonic()} {HISTORY}", "cache_salt": "one"}
    send(cluster, body, "local")
    deadline = time.monotonic() + 10
    while predicted(cluster, body) >= 256:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert predicted(cluster, body | {"cache_salt": "two"}) > 600
    assert predicted(cluster, {key: value for key, value in body.items() if key != "cache_salt"}) > 600

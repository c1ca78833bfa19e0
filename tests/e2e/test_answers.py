"""Right answers on real engines: through the router, by either path, token for token what the engine alone says."""

from __future__ import annotations

import json
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.serving import Serving, engine_counter

pytestmark = pytest.mark.engine

BLOCK = 32
CHUNK = 2048  # vLLM's default max_num_batched_tokens
LENGTHS = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 6000)
# A wrong block can first show as late as at token 36 of a 6,000-token prompt's answer.
TOKENS = 48


def prompt_of(length: int) -> str:
    """Letters from a fixed sequence; the tokenizer makes one token of each."""
    return "".join(chr(ord("a") + (i * i + i // 7 + length) % 26) for i in range(length))


def body_of(cluster: Serving, endpoint: str, length: int) -> dict:
    """A greedy request whose prompt has exactly `length` tokens, by the engine's own count."""
    shared = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    if endpoint == "/v1/completions":
        return shared | {"prompt": prompt_of(length)}

    def chat(text: str) -> dict:
        return {"messages": [{"role": "user", "content": text}]}

    frame = count_tokens(cluster, chat(""))
    assert count_tokens(cluster, chat(prompt_of(length - frame))) == length
    return shared | chat(prompt_of(length - frame))


def count_tokens(cluster: Serving, body: dict) -> int:
    url = cluster.instance("decode")["url"]
    return httpx.post(f"{url}/tokenize", json={"model": "tiny"} | body, trust_env=False).json()["count"]


def ask(
    url: str, endpoint: str, body: dict, *, stream: bool = False, path: str | None = None
) -> tuple[list[int], dict]:
    """Token ids and response headers. Salted, so that no cache of an earlier answer can stand in for this one."""
    headers = {"x-disagg-path": path} if path else {}
    whole = body | {"cache_salt": secrets.token_hex(8), "stream": stream}
    answer = httpx.post(url + endpoint, json=whole, headers=headers, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()["choices"][0]["token_ids"], dict(answer.headers)
    *events, last = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert last == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return [token for choice in choices for token in choice.get("token_ids") or []], dict(answer.headers)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_every_path_gives_the_engines_own_tokens(cluster, endpoint, length):
    """Around block and chunk borders, streamed and not; and the engine's counter says that the KV was pulled."""
    body = body_of(cluster, endpoint, length)
    alone, _ = ask(cluster.instance("decode")["url"], endpoint, body)
    assert len(alone) == TOKENS
    for stream in (False, True):
        for path, pulled in (("local", 0), ("remote_prefill", length)):
            before = cluster.pulled_tokens()
            tokens, headers = ask(cluster.url, endpoint, body, stream=stream, path=path)
            assert tokens == alone, (path, stream)
            assert headers["x-disagg-path"] == path
            assert headers.get("x-disagg-prefill") == ("prefill-0" if pulled else None)
            assert cluster.pulled_tokens() - before == pulled


def test_the_prompt_decides_the_answer(cluster):
    """Else equal answers would prove nothing: another first token gives another answer."""
    url = cluster.instance("decode")["url"]
    answers = [
        tuple(ask(url, "/v1/completions", {"model": "tiny", "prompt": first + prompt_of(300), "max_tokens": TOKENS,
                                           "temperature": 0, "return_token_ids": True})[0])
        for first in "abcdefgh"
    ]  # fmt: skip
    assert len(set(answers)) == len(answers)
    assert all(len(set(answer)) > 10 for answer in answers)


def test_the_threshold_policy_splits_by_exact_tokens(cluster):
    """255 stay, 256 go; a chat is counted with its template."""
    for length, path in ((255, "local"), (256, "remote_prefill")):
        for endpoint in ("/v1/completions", "/v1/chat/completions"):
            _, headers = ask(cluster.url, endpoint, body_of(cluster, endpoint, length))
            assert headers["x-disagg-path"] == path


def test_concurrent_requests_get_their_own_answers(cluster):
    """32 at once, both paths mixed: no answer is another prompt's."""
    bodies = [
        {"model": "tiny", "prompt": f"{i} " + prompt_of(40 + 23 * i), "max_tokens": 24, "temperature": 0,
         "ignore_eos": True, "return_token_ids": True}
        for i in range(32)
    ]  # fmt: skip
    url = cluster.instance("decode")["url"]
    alone = [ask(url, "/v1/completions", body)[0] for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        paths = ["local", "remote_prefill", None] * 11
        routed = list(pool.map(lambda b, p: ask(cluster.url, "/v1/completions", b, path=p)[0], bodies, paths))
    assert routed == alone


def test_c03_only_one_token_is_generated_by_the_prefill(cluster):
    """max_completion_tokens and min_tokens are the decode leg's."""
    url = cluster.instance("prefill")["url"]
    name = "vllm:generation_tokens_total"
    before = engine_counter(url, name)
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt_of(300)}], "temperature": 0}
    body |= {"max_completion_tokens": 24, "min_tokens": 12}
    answer = httpx.post(
        f"{cluster.url}/v1/chat/completions", json=body, headers={"x-disagg-path": "remote_prefill"}, timeout=60
    )
    assert 12 <= answer.json()["usage"]["completion_tokens"] <= 24
    assert engine_counter(url, name) - before == 1


def test_c11_a_refused_decode_leg_frees_the_prefill(cluster):
    """`logprobs: "x"` is stripped from the prefill leg and refused by the decode engine's schema. Without a release the
    blocks would stay for the lease, 30 s."""
    body = {"model": "tiny", "prompt": prompt_of(1500), "max_tokens": 4, "logprobs": "x"}
    headers = {"x-disagg-path": "remote_prefill"}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
    assert (answer.status_code, answer.headers["x-disagg-prefill"]) == (400, "prefill-0")
    deadline = time.monotonic() + 10
    while used := engine_counter(cluster.instance("prefill")["url"], "vllm:kv_cache_usage_perc"):
        assert time.monotonic() < deadline, used
        time.sleep(0.1)


def test_c11_a_stream_left_early_frees_the_kv_on_both_sides(cluster):
    """30 clients leave at different moments; KV usage and running requests go back to nothing."""

    def leave(after_s: float) -> None:
        body = {"model": "tiny", "prompt": prompt_of(1500) + str(after_s), "max_tokens": 2000, "stream": True}
        try:
            with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=after_s,
                              headers={"x-disagg-path": "remote_prefill"}) as answer:  # fmt: skip
                for _ in answer.iter_raw():
                    break
        except httpx.TimeoutException:
            pass

    threads = [threading.Thread(target=leave, args=(0.02 * i + 0.01,)) for i in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 35  # a lease, and 5 s
    urls = [cluster.instance(role)["url"] for role in ("prefill", "decode")]
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while left := {(url, name): v for url in urls for name in names if (v := engine_counter(url, name))}:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert cluster.status()["leases"] == []

"""A decode engine without room: who is refused, who waits, and that nothing is prefilled that could not be decoded."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.serving import Serving, cluster_config, engine_counter, proxying, running
from tests.e2e.traffic import Answer, ask, client, completion

pytestmark = [pytest.mark.engine, pytest.mark.long]

# One block is vLLM's own. What is left has room for one request of 1,000 tokens, and for no second one.
ARGS = "max-model-len: 1024, block-size: 32"
POOLS = "pools: {prefill: {instances: 1}, decode: {instances: 1, args: {num-gpu-blocks-override: 34}}}"
ROUTER = "admission: {max_wait_s: 1}, slo: {ttft_ms: 5000, tpot_ms: 100, max_gap_ms: 500}"
LONG_STREAM = 300, 700  # tokens in and out; several seconds
NEXT = 900, 100


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Roles are binding under threshold, so that all decoding is one engine's. It has learned how long answers are."""
    router = f"policy: {{name: threshold, tokens: 256}}, {ROUTER}"
    with running(tmp_path_factory.mktemp("backpressure"), cluster_config(POOLS, router, ARGS)) as serving:
        with client() as via:
            for tokens in (*[LONG_STREAM] * 4, NEXT, NEXT):
                assert ask(via, serving.url, completion(random.Random(), *tokens)).status == 200
        yield serving


@pytest.fixture
def via() -> Iterator[httpx.Client]:
    with client() as made:
        yield made


@contextmanager
def decoding(url: str, until_events: int) -> Iterator[None]:
    """A stream that fills the engine; entered once so many of its tokens have come."""
    reached = threading.Event()

    def stream() -> Answer:
        with client() as via:
            body = completion(random.Random(), *LONG_STREAM)
            return ask(via, url, body, on_events=lambda events: reached.set() if events >= until_events else None)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream)
        assert reached.wait(60)
        yield
        assert answer.result().status == 200


def prefilled_tokens(served: Serving) -> float:
    return served.prompt_tokens("prefill-0")["local_compute"]


def until_nothing_is_held(served: Serving, limit_s: float = 10.0) -> None:
    """Well before a lease would end: no lease, nobody in the queue, no block on either engine, no handoff given up."""
    deadline = time.monotonic() + limit_s
    while True:
        status = served.status()
        urls = [one["url"] for one in status["instances"]]
        used = [engine_counter(url, "vllm:kv_cache_usage_perc") for url in urls]
        if not any(used) and not status["leases"] and not status["queue_waiting"]:
            break
        assert time.monotonic() < deadline, (used, status["leases"], status["queue_waiting"])
        time.sleep(0.1)
    assert sum(engine_counter(url, "vllm:nixl_num_kv_expired_reqs_total") for url in urls) == 0
    assert engine_counter(served.admin_url, "disagg_handoffs_total", result="abandoned") == 0


def test_what_would_wait_too_long_is_refused_before_it_is_prefilled(served, via):
    """The stream has most of its tokens to come: 429 at once, with the time until it will be over."""
    with decoding(served.url, until_events=20):
        before = prefilled_tokens(served)
        answer = ask(via, served.url, completion(random.Random(), *NEXT))
        assert (answer.status, answer.code) == (429, "decode_full")
        assert answer.retry_after_s is not None
        assert 1 <= answer.retry_after_s <= 30
        assert answer.ttft_s < 1  # it did not wait for what would not come
        assert prefilled_tokens(served) == before
    until_nothing_is_held(served)


def test_what_need_not_wait_long_waits_and_is_served(served, via):
    """The stream is about to end: the prompt is prefilled once the stream has gone, and handed off."""
    with decoding(served.url, until_events=620):
        before = prefilled_tokens(served)
        answer = ask(via, served.url, completion(random.Random(), *NEXT))
        assert (answer.status, answer.path) == (200, "remote_prefill")
        assert prefilled_tokens(served) == before + NEXT[0]
    until_nothing_is_held(served)


def storm(url: str, clients: int, each: int) -> list[Answer]:
    """Prompts of 300 to 500 tokens, and clients that ask again at once."""

    def one(seed: int) -> list[Answer]:
        rng = random.Random(seed)
        with client() as via:
            return [ask(via, url, completion(rng, rng.randrange(300, 500), 150)) for _ in range(each)]

    with ThreadPoolExecutor(clients) as pool:
        return [answer for answers in pool.map(one, range(clients)) for answer in answers]


def assert_served_or_refused(answers: list[Answer]) -> Counter[tuple[int, str | None]]:
    kinds = Counter((one.status, one.code) for one in answers)
    refused = [one for one in answers if one.status != 200]
    assert kinds.keys() <= {(200, None), *((status, "decode_full") for status in (429, 503))}, kinds
    assert all(one.retry_after_s and one.retry_after_s >= 1 for one in refused)
    return kinds


def test_a_storm_leaves_no_handoff_behind(served, measured):
    """Many more handoffs than the decode engine has room for: each is pulled, or was never made."""
    before, pulled = prefilled_tokens(served), served.pulled_tokens()
    answers = storm(served.url, clients=10, each=8)
    kinds = assert_served_or_refused(answers)
    measured.append(f"storm on one decode engine: {dict(kinds)}")
    assert {one.path for one in answers if one.status == 200} == {"remote_prefill"}
    prompts = sum(one.prompt_tokens for one in answers if one.status == 200)
    assert (prefilled_tokens(served) - before, served.pulled_tokens() - pulled) == (prompts, prompts)
    until_nothing_is_held(served)


# --- the default policy, in front of the same two engines -------------------------------------------------------------


@pytest.fixture(scope="module")
def soft(served: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Any engine may decode, and the prefill one has room for four."""
    engines = {role: served.instance(role)["url"] for role in ("prefill", "decode")}
    listed = [f"{{id: {role}-0, url: '{url}', role: {role}}}" for role, url in engines.items()]
    config = cluster_config(f"fleet: {{static: [{', '.join(listed)}]}}", ROUTER, ARGS)
    with proxying(tmp_path_factory.mktemp("soft"), config) as router:
        yield router


def test_the_other_engine_decodes_what_does_not_fit(soft, via):
    """Under soft roles a full engine is no reason to wait while another has room."""
    with decoding(soft.url, until_events=20):
        answer = ask(via, soft.url, completion(random.Random(), *NEXT))
        assert (answer.status, answer.decode) == (200, "prefill-0")


def test_a_storm_on_both_leaves_no_handoff_behind(soft, measured):
    """Whatever path each took."""
    answers = storm(soft.url, clients=10, each=8)
    kinds = assert_served_or_refused(answers)
    paths = Counter((one.path, one.decode) for one in answers if one.status == 200)
    measured.append(f"storm under soft roles: {dict(kinds)}, {dict(paths)}")
    until_nothing_is_held(soft)

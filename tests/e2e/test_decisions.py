"""The default policy on real engines: what it sends where, and how it takes an instance that grows slow."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.serving import SOURCES, Serving, cluster_config, engine_processes, running
from tests.e2e.traffic import Answer, ask, chats, client, completion, until_more

pytestmark = [pytest.mark.engine, pytest.mark.long]

INSTANCES = "prefill-0", "decode-0"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    slo = "slo: {ttft_ms: 500, tpot_ms: 25, max_gap_ms: 100}, allow_path_override: false"
    pools = "pools: {prefill: {instances: 1}, decode: {instances: 1}}"
    with running(tmp_path_factory.mktemp("decisions"), cluster_config(pools, slo)) as serving:
        yield serving


@pytest.fixture
def via() -> Iterator[httpx.Client]:
    with client() as made:
        yield made


class Objectives:
    """Of the streams, from what the router predicts while long prompts come: a machine that others use is slower, and
    a stream whose objective is out of reach is not worth protecting.

    A pause may be `pause_allowed` times the one that a long prompt among the streams would make, and at least
    `least_pause_s`.
    """

    def __init__(self, served: Serving, via: httpx.Client, pause_allowed: float, least_pause_s: float = 0.0) -> None:
        self._served, self._via = served, via
        self._pause_allowed, self._least_pause_s = pause_allowed, least_pause_s
        self._pauses_s: deque[float] = deque([1.0], maxlen=9)
        self._step_s = 0.0

    def headers(self) -> Mapping[str, str]:
        gap_s = max(self._least_pause_s, self._pause_allowed * statistics.median(self._pauses_s))
        tpot_s = max(0.025, 3 * self._step_s)
        return {"x-slo-max-gap-ms": f"{1000 * gap_s:.0f}", "x-slo-tpot-ms": f"{1000 * tpot_s:.0f}"}

    def look(self, body: dict, headers: Mapping[str, str]) -> None:
        terms = self._via.post(f"{self._served.admin_url}/debug/route", json=body, headers=headers).json()["terms"]
        self._step_s = terms["local_step_s"]
        if terms["local_pause_s"] > 0:  # 0: its best local way is where no stream runs
            self._pauses_s.append(terms["local_pause_s"])


def long_prompt(
    served: Serving, via: httpx.Client, objectives: Objectives, rng: random.Random, ttft_s: float, output_tokens: int
) -> Answer:
    """Then a pause, in which the streams go on alone."""
    body = completion(rng, 6000, output_tokens)
    headers = {"x-slo-ttft-ms": f"{1000 * ttft_s:.0f}", "x-slo-max-gap-ms": "1000", "x-slo-tpot-ms": "100"}
    objectives.look(body, headers)
    answer = ask(via, served.url, body, headers)
    assert answer.status == 200, answer
    time.sleep(0.3)
    return answer


def expected_tokens(answers: list[Answer]) -> dict[str, Counter[str]]:
    """Instance -> how its engine must have come by the prompts of these answers."""
    found: dict[str, Counter[str]] = {instance: Counter() for instance in INSTANCES}
    for answer in answers:
        assert answer.decode is not None
        found[answer.prefill or answer.decode]["local_compute"] += answer.prompt_tokens
        if answer.prefill:
            found[answer.decode]["external_kv_transfer"] += answer.prompt_tokens
    return found


def test_long_prompts_go_elsewhere_while_streams_run_and_short_ones_stay(served, via, measured):
    """By the response headers, and by the engines' own counts of what they computed and what they pulled."""
    rng, objectives = random.Random(1), Objectives(served, via, 0.75, least_pause_s=0.1)

    def long_prompts(count: int) -> list[Answer]:
        return [long_prompt(served, via, objectives, rng, 15.0, 16) for _ in range(count)]

    with chats(served.url, 6, headers=objectives.headers) as warm_up:
        until_more(warm_up, 18)
        long_prompts(10)
    before = {instance: served.prompt_tokens(instance) for instance in INSTANCES}
    with chats(served.url, 6, headers=objectives.headers) as short:
        until_more(short, 6)
        long = long_prompts(8)
    assert {answer.status for answer in short + long} == {200}
    paths = Counter(answer.path for answer in short)
    measured.append(f"beside 6 streams: {len(long)} long prompts; short ones by path: {dict(paths)}")
    assert [(one.path, one.prefill, one.decode) for one in long] == [("remote_prefill", *INSTANCES)] * len(long)
    assert paths["local"] >= 0.95 * len(short)  # one that would land on many streams may be better off elsewhere
    for instance, counted in expected_tokens(short + long).items():
        now = served.prompt_tokens(instance)
        assert {s: now[s] - before[instance][s] for s in SOURCES} == {s: counted[s] for s in SOURCES}, instance


# --- an instance that grows slow ------------------------------------------------------------------------------------

# A pause allowed is so many times the one that the router predicts for a long prompt computed among the streams: then
# that costs about a third of a stream, which is more than a handoff and less than a first token that comes too late.
PAUSE_ALLOWED = 1.7
TTFT_ALLOWED = 2.5  # times a healthy one
STOPPED_S, PULSE_S = 0.4, 0.5
TURNS_AWAY_REQUESTS = 5
BACK_REQUESTS, BACK_S = 300, 60.0


@contextmanager
def slowed(pids: list[int]) -> Iterator[None]:
    """Stopped for STOPPED_S of every PULSE_S."""
    over = threading.Event()

    def pulse() -> None:
        while not over.is_set():
            send(signal.SIGSTOP)
            time.sleep(STOPPED_S)
            send(signal.SIGCONT)
            time.sleep(PULSE_S - STOPPED_S)

    def send(signum: int) -> None:
        for pid in pids:
            os.kill(pid, signum)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.timeout(420)
def test_a_slowed_prefill_is_left_alone_and_comes_back(served, via, measured):
    """SIGSTOP pulses: given up within 5 requests, used again within 300 requests or 60 s of its recovery."""
    rng, objectives, ttft_s = random.Random(2), Objectives(served, via, PAUSE_ALLOWED), 15.0
    with chats(served.url, 3, output_tokens=200, headers=objectives.headers) as answers:
        until_more(answers, 6)
        warm_up = [long_prompt(served, via, objectives, rng, ttft_s, 2) for _ in range(10)]
        ttft_s = TTFT_ALLOWED * statistics.median(one.ttft_s for one in warm_up if one.prefill)
        until_more(answers, 6)
        healthy = [long_prompt(served, via, objectives, rng, ttft_s, 2) for _ in range(10)]
        assert sum(one.used("prefill-0") for one in healthy) >= 8, healthy
        with slowed(engine_processes(served.cluster, "prefill-0")):
            slow = [long_prompt(served, via, objectives, rng, ttft_s, 2) for _ in range(15)]
        used = [i for i, one in enumerate(slow, 1) if one.used("prefill-0")]
        measured.append(f"prefill slowed by SIGSTOP: used by requests {used} of the next {len(slow)}")
        assert sum(i > TURNS_AWAY_REQUESTS for i in used) <= 2  # doubt grows with time, and it is tried again
        recovered_s, count, last = time.monotonic(), 0, deque([False], maxlen=5)
        while sum(last) < 3:
            last.append(long_prompt(served, via, objectives, rng, ttft_s, 2).used("prefill-0"))
            count += 1
            assert count <= BACK_REQUESTS or time.monotonic() - recovered_s <= BACK_S
        back_s = time.monotonic() - recovered_s
        measured.append(f"prefill recovered: used by 3 of 5 after {count} requests, {back_s:.1f} s")

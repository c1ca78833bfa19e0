"""Requests as clients send them, and what became of each by its response headers."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

LIMIT_S = 120.0
NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True)
class Answer:
    """`code` and `retry_after_s` are of an error; `ttft_s` is the time to the first byte."""

    status: int
    path: str | None
    decode: str | None
    prefill: str | None
    code: str | None
    retry_after_s: int | None
    prompt_tokens: int
    ttft_s: float

    def used(self, instance: str) -> bool:
        return instance in (self.decode, self.prefill)


def completion(rng: random.Random, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Greedy and exactly that long; one digit is one token, and no two prompts begin alike."""
    prompt = f"{rng.getrandbits(4 * prompt_tokens):0{prompt_tokens}x}"
    return {"model": "tiny", "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}


def client() -> httpx.Client:
    return httpx.Client(timeout=LIMIT_S, trust_env=False, verify=False)


def ask(
    via: httpx.Client,
    url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] = NO_HEADERS,
    on_events: Callable[[int], None] | None = None,
) -> Answer:
    """A streamed completion, read to its end; `on_events` hears how many events have come."""
    begun_s, first_s, events, error = time.monotonic(), 0.0, 0, b""
    with via.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, headers=dict(headers)) as answer:
        for chunk in answer.iter_raw():
            first_s = first_s or time.monotonic()
            if answer.status_code != 200:
                error += chunk
            events += chunk.count(b"data: ")
            if on_events is not None:
                on_events(events)
    told = answer.headers
    return Answer(
        status=answer.status_code,
        path=told.get("x-disagg-path"),
        decode=told.get("x-disagg-decode"),
        prefill=told.get("x-disagg-prefill"),
        code=json.loads(error)["error"]["code"] if error else None,
        retry_after_s=int(told["retry-after"]) if "retry-after" in told else None,
        prompt_tokens=len(body["prompt"]),
        ttft_s=first_s - begun_s,
    )


@contextmanager
def chats(
    url: str, streams: int, *, output_tokens: int = 96, headers: Callable[[], Mapping[str, str]] = dict
) -> Iterator[list[Answer]]:
    """So many streams of 200-token prompts in a closed loop, and their answers as they come; `headers` is asked for
    those of the next request."""
    answers: list[Answer] = []
    over = threading.Event()

    def stream(seed: float) -> None:
        rng = random.Random(seed)
        with client() as via:
            while not over.is_set():
                answers.append(ask(via, url, completion(rng, 200, output_tokens), headers()))

    with ThreadPoolExecutor(streams) as pool:
        running = [pool.submit(stream, time.monotonic() + i) for i in range(streams)]
        try:
            yield answers
        finally:
            over.set()
    for one in running:
        one.result()


def until_more(answers: list[Answer], count: int, limit_s: float = 60.0) -> None:
    """Until so many more have come."""
    wanted, deadline = len(answers) + count, time.monotonic() + limit_s
    while len(answers) < wanted:
        assert time.monotonic() < deadline, answers[-3:]
        time.sleep(0.05)

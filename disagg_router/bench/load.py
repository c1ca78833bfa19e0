"""A mixed load: chat streams in a closed loop, and long prompts that arrive at random among them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from disagg_router.bench.exchange import Client, Endpoint, Outcome

PATH = "/v1/completions"
REFUSED_PAUSE_S = 0.25  # a client that is told "no room" does not ask again at once
CHATS_END_LIMIT_S = 5.0
LETTER_BITS = 4  # prompts are hexadecimal digits: one token each for a byte-level tokenizer


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` chats run at a time, each starts the next when it ends; `long_gap_s` is the mean between arrivals."""

    served_name: str
    streams: int = 6
    chat_prompt_tokens: int = 200
    chat_output_tokens: int = 96
    long_prompt_tokens: int = 6000
    long_output_tokens: int = 96
    long_gap_s: float = 2.5
    long_slo_ttft_ms: int = 15_000


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Long prompts arrive `arrivals_s` after the start, all within `round_s`. After that the chats go on, not counted,
    until the long prompts are done or `drain_s` is over: who puts them off is not rewarded with an easier end."""

    round_s: float
    drain_s: float
    arrivals_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RoundLog:
    """All requests of a round that lasted from `begun_s` to `end_s`; `cpu_share` is what the load itself took of a
    core."""

    begun_s: float
    end_s: float
    chats: tuple[Outcome, ...]
    longs: tuple[Outcome, ...]
    cpu_share: float


def poisson_arrivals(rng: random.Random, mean_gap_s: float, round_s: float) -> tuple[float, ...]:
    """Times in [0, round_s) of a Poisson process."""
    found: list[float] = []
    at_s = rng.expovariate(1 / mean_gap_s)
    while at_s < round_s:
        found.append(at_s)
        at_s += rng.expovariate(1 / mean_gap_s)
    return tuple(found)


async def run_round(endpoint: Endpoint, load: Load, plan: RoundPlan, rng: random.Random) -> RoundLog:
    """`rng` makes the prompts: none begins as another did, so no cache helps."""
    chats: list[Outcome] = []
    longs: list[Outcome] = []
    bodies = [_body(load, rng, load.long_prompt_tokens, load.long_output_tokens) for _ in plan.arrivals_s]
    open_ = asyncio.Event()
    open_.set()
    begun_s, cpu_s = endpoint.now_s(), time.process_time()
    streams = [asyncio.create_task(_chat_stream(endpoint, load, rng, open_.is_set, chats)) for _ in range(load.streams)]
    arrivals = [
        asyncio.create_task(_long_prompt(endpoint, load, at_s, body, longs))
        for at_s, body in zip(plan.arrivals_s, bodies, strict=True)
    ]
    try:
        await asyncio.sleep(plan.round_s)
        end_s = endpoint.now_s()
        cpu_share = (time.process_time() - cpu_s) / (end_s - begun_s)
        await _at_most(plan.drain_s, arrivals)
        open_.clear()
        await _at_most(CHATS_END_LIMIT_S, streams)
    finally:
        for task in (*streams, *arrivals):
            task.cancel()
        await asyncio.gather(*streams, *arrivals, return_exceptions=True)
    return RoundLog(begun_s, end_s, tuple(chats), tuple(longs), cpu_share)


async def _chat_stream(
    endpoint: Endpoint, load: Load, rng: random.Random, is_open: Callable[[], bool], into: list[Outcome]
) -> None:
    client = Client(endpoint)
    try:
        while is_open():
            body = _body(load, rng, load.chat_prompt_tokens, load.chat_output_tokens)
            outcome = await _sent(endpoint, client, client.post(PATH, body, load.chat_output_tokens), into)
            if not outcome.complete:
                await asyncio.sleep(REFUSED_PAUSE_S)
    finally:
        client.close()


async def _long_prompt(endpoint: Endpoint, load: Load, at_s: float, body: bytes, into: list[Outcome]) -> None:
    await asyncio.sleep(at_s)
    client = Client(endpoint)
    slo = (f"x-slo-ttft-ms: {load.long_slo_ttft_ms}",)
    try:
        await _sent(endpoint, client, client.post(PATH, body, load.long_output_tokens, slo), into)
    finally:
        client.close()


async def _sent(endpoint: Endpoint, client: Client, post: Awaitable[Outcome], into: list[Outcome]) -> Outcome:
    sent_s = endpoint.now_s()
    try:
        outcome = await post
    except asyncio.CancelledError:
        into.append(client.given_up(sent_s))
        raise
    into.append(outcome)
    return outcome


async def _at_most(limit_s: float, tasks: Sequence[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=limit_s)


def _body(load: Load, rng: random.Random, prompt_tokens: int, output_tokens: int) -> bytes:
    """Greedy, exactly `output_tokens` long."""
    prompt = f"{rng.getrandbits(LETTER_BITS * prompt_tokens):0{prompt_tokens}x}"
    return (
        f'{{"model":"{load.served_name}","prompt":"{prompt}","max_tokens":{output_tokens},"ignore_eos":true,'
        '"temperature":0,"stream":true,"stream_options":{"include_usage":true}}'
    ).encode()

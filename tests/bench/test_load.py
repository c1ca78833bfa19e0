"""The load generator against a scripted engine: what is sent, and what counts as done, refused or failed."""

from __future__ import annotations

import random
import time

import pytest

from disagg_router.bench.exchange import Client, Endpoint, fetch
from disagg_router.bench.load import Load, RoundPlan, poisson_arrivals, run_round
from tests.fakes.engine import FakeEngine, Script

TOKENS = 4
LOAD = Load("tiny", streams=2, chat_prompt_tokens=20, chat_output_tokens=TOKENS, long_prompt_tokens=300)
BODY = b'{"model":"tiny","prompt":"abc","max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}'
PLAN = RoundPlan(round_s=0.3, drain_s=0.3, arrivals_s=(0.05, 0.1))


@pytest.fixture
async def engine():
    async with FakeEngine() as engine:
        yield engine


def endpoint(engine: FakeEngine) -> Endpoint:
    return Endpoint("127.0.0.1", engine.port, time.perf_counter)


async def ask(engine: FakeEngine, *scripts: Script, wanted_tokens: int = TOKENS):
    engine.script(*scripts)
    client = Client(endpoint(engine))
    try:
        return await client.post("/v1/completions", BODY, wanted_tokens)
    finally:
        client.close()


# --- one request --------------------------------------------------------------------------------------------


async def test_every_token_is_timed(engine):
    """Half a character has no text and is a token all the same, so events are counted by their choices."""
    outcome = await ask(engine)
    assert outcome.complete
    assert len(outcome.event_s) == TOKENS
    assert [outcome.sent_s, *outcome.event_s, outcome.ended_s] == sorted(
        [outcome.sent_s, *outcome.event_s, outcome.ended_s]
    )


@pytest.mark.parametrize(
    ("script", "status", "refused"),
    [
        (Script(status=429), 429, True),
        (Script(status=503), 503, True),
        (Script(status=500), 500, False),
        (Script(status=400), 400, False),
        (Script(cut_after=2), 200, False),
        (Script(cut_after=TOKENS + 1), 200, False),  # all tokens and the usage, but no [DONE]
        (Script(error_first=500), 200, False),
        (Script(error_after=(2, {"error": {"message": "lost", "code": 500}})), 200, False),
        (Script(close=True), None, False),
        (Script(reset=True), None, False),
        (Script(raw=(b"no HTTP at all\r\n\r\n",)), None, False),
    ],
)
async def test_only_a_whole_answer_counts(engine, script, status, refused):
    """Anything else is refused, by the router's own word, or failed."""
    outcome = await ask(engine, script)
    assert (outcome.complete, outcome.status, outcome.refused, outcome.failed) == (False, status, refused, not refused)


async def test_fewer_tokens_than_asked_for_are_no_whole_answer(engine):
    """By the server's own count: an engine may put several tokens into one event."""
    assert (await ask(engine, wanted_tokens=TOKENS + 1)).failed


async def test_a_server_that_is_not_there_is_a_failure():
    """And no exception: the load goes on."""
    async with FakeEngine() as engine:
        gone = endpoint(engine)
    assert (await Client(gone).post("/v1/completions", BODY, TOKENS)).failed


async def test_a_connection_is_used_again_until_the_server_closes_it(engine):
    """As a chat client would; the next request then opens another."""
    client = Client(endpoint(engine))
    engine.script(Script(), Script(), Script(cut_after=1))
    outcomes = [await client.post("/v1/completions", BODY, TOKENS) for _ in range(4)]
    client.close()
    assert [outcome.complete for outcome in outcomes] == [True, True, False, True]
    assert [request.connection for request in engine.generations()] == [1, 1, 1, 2]


async def test_fetch_takes_200_only(engine):
    """What waits for a server asks again until it is there."""
    assert await fetch("127.0.0.1", engine.port, "/health") == b""
    engine.healthy = False
    assert await fetch("127.0.0.1", engine.port, "/health") is None
    await engine.die()
    assert await fetch("127.0.0.1", engine.port, "/health") is None


# --- a round ------------------------------------------------------------------------------------------------


async def test_a_round_keeps_its_chats_going_and_sends_every_long_prompt(engine):
    """Chats one after another, long prompts with an objective of their own, and no two prompts that begin alike."""
    log = await run_round(endpoint(engine), LOAD, PLAN, random.Random(1))
    assert len(log.longs) == 2
    assert len(log.chats) > LOAD.streams
    assert all(outcome.complete for outcome in (*log.chats, *log.longs))
    sent = engine.generations()
    prompts = [request.body["prompt"] for request in sent]
    assert sorted({len(prompt) for prompt in prompts}) == [20, 300]
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)
    slos = {len(request.body["prompt"]): request.headers.get("x-slo-ttft-ms") for request in sent}
    assert slos == {20: None, 300: "15000"}
    assert all(request.body["ignore_eos"] and request.body["temperature"] == 0 for request in sent)
    assert log.cpu_share > 0


async def test_the_round_waits_for_its_long_prompts_with_the_chats_going_on(engine):
    """So that putting a long prompt off to the end is no way to an easier load."""
    engine.script(Script(), Script(), *[Script(event_delay_s=0.005)] * 100)
    plan = RoundPlan(round_s=0.1, drain_s=5, arrivals_s=(0.09,))
    log = await run_round(endpoint(engine), LOAD, plan, random.Random(1))
    (long,) = log.longs
    assert long.complete
    assert long.ended_s > log.end_s
    assert any(chat.sent_s > log.end_s for chat in log.chats)


async def test_what_hangs_is_given_up_when_the_drain_is_over(engine):
    """And is kept with the tokens it had."""
    load = Load("tiny", streams=0, long_prompt_tokens=300, long_output_tokens=TOKENS)
    engine.script(Script(hang_after=2))
    log = await run_round(endpoint(engine), load, PLAN, random.Random(1))
    assert sorted((long.given_up, long.complete, len(long.event_s)) for long in log.longs) == [
        (False, True, TOKENS),
        (True, False, 2),
    ]


def test_arrivals_are_poisson():
    """2,000 of them at a mean gap of 2.5 s: the mean of the gaps is within 3 standard errors (2.5 / sqrt(2000)), and
    e^-1 of them are longer than the mean."""
    times = poisson_arrivals(random.Random(1), 2.5, 5000)
    assert times == tuple(sorted(times))
    assert 0 <= times[0] <= times[-1] < 5000
    gaps = [b - a for a, b in zip((0.0, *times), times, strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(2.5, abs=0.17)
    assert sum(gap > 2.5 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.033)

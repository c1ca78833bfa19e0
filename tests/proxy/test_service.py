"""The router as its clients see it: real sockets, scripted engines."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from disagg_router.model import InstanceState, PairState
from disagg_router.proxy.openai import ROUTED_ENDPOINTS
from tests.fakes.engine import FakeEngine, Script
from tests.proxy.service import fakes, running

LOCAL, REMOTE = {"x-disagg-path": "local"}, {"x-disagg-path": "remote_prefill"}


async def alone(engine: FakeEngine, path: str, body: dict) -> dict:
    """The same request to the engine without a router."""
    async with httpx.AsyncClient() as http:
        return (await http.post(engine.url + path, json=body)).json()


def text(answer: dict) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("forced", [LOCAL, REMOTE])
async def test_both_paths_answer_as_the_engine_alone(path, forced):
    """With the path and the targets in the headers."""
    body = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 20}
    if "chat" in path:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 100}], "max_tokens": 20}
    async with fakes("p", "d") as (p, d), running(("prefill", p), ("decode", d)) as service:
        answer = await service.http.post(path, json=body, headers={**forced, "x-request-id": "mine"})
        assert (answer.status_code, text(answer.json())) == (200, text(await alone(d, path, body)))
        assert answer.headers["x-disagg-path"] == forced["x-disagg-path"]
        assert answer.headers["x-disagg-decode"] == "decode-0"
        assert answer.headers.get("x-disagg-prefill") == ("prefill-0" if forced is REMOTE else None)
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["content-type"] == "application/json"
        assert p.pinned == {}


@pytest.mark.parametrize("forced", [LOCAL, REMOTE])
async def test_c27_a_stream_arrives_as_it_is_made(forced):
    """Event by event, unbuffered, with the headers that keep others from buffering it."""
    async with fakes("p", "d") as (p, d), running(("prefill", p), ("decode", d)) as service:
        d.script(Script(event_delay_s=0.05))
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "stream": True}
        loop, times, lines = asyncio.get_running_loop(), [], []
        async with service.http.stream("POST", "/v1/completions", json=body, headers=forced) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-accel-buffering"] == "no"
            assert "content-encoding" not in answer.headers
            async for line in answer.aiter_lines():
                if line:
                    lines.append(line)
                    times.append(loop.time())
        assert lines[-1] == "data: [DONE]"
        assert times[-1] - times[0] > 0.2
        streamed = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
        assert streamed == text(await alone(d, "/v1/completions", body | {"stream": False}))


async def test_the_threshold_decides_by_the_engines_count():
    """255 tokens stay, 256 go."""
    async with fakes("p", "d") as (p, d), running(("prefill", p), ("decode", d)) as service:
        paths = [(await service.complete(x * n)).headers["x-disagg-path"] for x, n in (("x", 255), ("y", 256))]
        assert paths == ["local", "remote_prefill"]


@pytest.mark.parametrize("where", ["top", "xargs"])
async def test_c37_fields_that_steer_engines_are_removed(where):
    """A client's kv_transfer_params would kill the decode engine or read another request's KV."""
    hostile = {"do_remote_prefill": True}
    fields = {"kv_transfer_params": hostile, "request_id": "theirs"} if where == "top" else {}
    if where == "xargs":
        fields = {"vllm_xargs": {"kv_transfer_params": "x", "kv_cache_report_mode": "full", "fine": 1}}
    headers = {**LOCAL, "x-data-parallel-rank": "3", "x-request-id": "a", "x-session-id": "s", "cookie": "c"}
    async with fakes("d") as (d,), running(("decode", d)) as service:
        for _ in range(2):
            assert (await service.complete(headers=headers, **fields)).status_code == 200
        first, second = d.generations()[-2:]
        assert {"kv_transfer_params", "request_id"}.isdisjoint(first.body)
        assert first.body.get("vllm_xargs", {"fine": 1}) == {"fine": 1}
        assert {"x-data-parallel-rank", "x-session-id", "cookie"}.isdisjoint(first.headers)
        assert first.headers["x-request-id"] != second.headers["x-request-id"]


async def test_credentials_and_trace_context_reach_the_engine():
    """On both legs."""
    given = {"authorization": "Bearer k", "traceparent": "00-aa-bb-01"}
    async with fakes("p", "d") as (p, d), running(("prefill", p), ("decode", d)) as service:
        await service.complete(headers={**REMOTE, **given})
        for leg in (p.generations()[-1], d.generations()[-1]):
            assert {key: leg.headers[key] for key in given} == given


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "several sequences"),
        ({"echo": True}, "the prompt's own logprobs"),
        ({"prompt_logprobs": 1}, "the prompt's own logprobs"),
        ({"prompt_logprobs": 0}, "zero still asks for them"),
        ({"best_of": 3}, "several sequences"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1, 2], [3]]}, "several prompts"),
        ({"response_format": {"type": "json_object"}}, "a grammar"),
        ({"use_beam_search": True}, "beams"),
    ],
)
async def test_shapes_that_must_not_be_split_stay_whole(fields, why):
    """Never a wrong answer: one instance does it all."""
    async with fakes("p", "d") as (p, d):
        async with running(("prefill", p), ("decode", d), router={"policy": {"name": "always_remote"}}) as service:
            before = len(p.generations())
            answer = await service.complete(**fields)
            assert answer.headers["x-disagg-path"] == "local", why
            assert len(p.generations()) == before
            assert (await service.complete(headers=REMOTE, **fields)).status_code == 400


async def test_a_token_id_prompt_is_split_like_a_text():
    """One list of ids is one prompt."""
    async with fakes("p", "d") as (p, d), running(("prefill", p), ("decode", d)) as service:
        answer = await service.complete(prompt=list(range(3, 303)))
        assert answer.headers["x-disagg-path"] == "remote_prefill"


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "bad_request"),
        (b"[]", 400, "bad_request"),
        (b'"x"', 400, "bad_request"),
        (b"", 400, "bad_request"),
        (b"\xff\xfe{}", 400, "bad_request"),
        (b'{"model": "other", "prompt": "x"}', 404, "model_not_found"),
        (b'{"model": 7, "prompt": "x"}', 404, "model_not_found"),
        (b'{"model": ["tiny"], "prompt": "x"}', 404, "model_not_found"),
        (b'{"model": {}, "prompt": "x"}', 404, "model_not_found"),
        (b'{"model": "tiny", "prompt": "x", "stream": "yes"}', 400, "bad_request"),
        (b'{"model": "tiny", "prompt": "\xff\xfe"}', 400, "bad_request"),
        (b'{"model": "tiny", "prompt": [1e999]}', 400, "bad_request"),
        (b'{"model": "tiny", "prompt": "x", "cache_salt": "\xff"}', 400, "bad_request"),
        (b"[" * 100_000, 400, "bad_request"),
        (b'{"a":' * 100_000, 400, "bad_request"),
        (b'{"model": "tiny", "messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, "bad_request"),
    ],
)
async def test_a_bad_body_is_refused_with_a_code(content, status, code):
    """Without a call to any engine."""
    async with fakes("d") as (d,), running(("decode", d)) as service:
        answer = await service.http.post("/v1/completions", content=content, headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.headers["x-request-id"] == "mine"
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert d.generations() == []


@pytest.mark.parametrize("value", ["0", "-1", "1e-322", "0.09", "inf", "nan"])
async def test_an_objective_that_is_none_is_refused(value):
    """One so small that it is 0 in seconds, too: others' chances are divided by it."""
    async with fakes("d") as (d,), running(("decode", d)) as service:
        answer = await service.complete(headers={"x-slo-max-gap-ms": value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-slo-max-gap-ms")


@pytest.mark.parametrize(
    "header", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-max-gap-ms", "x-priority", "x-disagg-path"]
)
async def test_a_bad_header_is_refused_by_name(header):
    """Not silently ignored."""
    async with fakes("d") as (d,), running(("decode", d)) as service:
        answer = await service.complete(headers={header: "soon"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, header)


async def test_without_permission_the_path_header_is_ignored():
    """Only where the config allows it."""
    async with fakes("p", "d") as (p, d):
        async with running(("prefill", p), ("decode", d), router={"allow_path_override": False}) as service:
            assert (await service.complete(headers=REMOTE)).headers["x-disagg-path"] == "local"


async def test_c20_the_body_limit_is_the_configs():
    """At it served, above it 413 that names the limit; also without a declared length."""
    async with fakes("d") as (d,), running(("decode", d), limits={"body_mb": 1}) as service:
        frame = len(json.dumps({"model": "tiny", "prompt": ""}))
        fits = json.dumps({"model": "tiny", "prompt": "x" * (2**20 - frame)}).encode()
        assert len(fits) == 2**20
        over = fits + b" "

        async def in_parts(content):
            for start in range(0, len(content), 65536):
                yield content[start : start + 65536]

        answers = [
            await service.http.post("/v1/completions", content=content)
            for content in (fits, over, in_parts(fits), in_parts(over))
        ]
        assert [a.status_code for a in answers] == [400, 413, 400, 413]  # 400: longer than the engine's context
        assert "limits.body_mb (1 MiB)" in answers[1].json()["error"]["message"]


async def test_the_engines_own_refusal_is_passed_on():
    """Status and body as the engine gave them."""
    async with fakes("d") as (d,), running(("decode", d)) as service:
        answer = await service.complete(max_tokens=0)
        assert answer.headers["x-disagg-decode"] == "decode-0"
        assert (answer.status_code, answer.json()) == (400, await alone(d, "/v1/completions", answer_body(0)))


def answer_body(max_tokens: int) -> dict:
    return {"model": "tiny", "prompt": "hello", "max_tokens": max_tokens}


@pytest.mark.parametrize(
    "path",
    ["/add_worker", "/pause", "/reset_prefix_cache", "/v1/load_lora_adapter", "/invocations", "/metrics", "/status",
     "//v1/completions", "/v1/../pause", "/v1/%2e%2e/pause", "/v1/completions/", "/docs", "/openapi.json", "/"],
)  # fmt: skip
async def test_c35_everything_else_is_404_without_an_upstream_call(path):
    """The public listener is an allow-list."""
    async with fakes("d") as (d,), running(("decode", d)) as service:
        before = {r.path for r in d.requests}
        for method in ("GET", "POST"):
            answer = await service.http.request(method, f"http://127.0.0.1:{service.port}{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "bad_request")
        assert {r.path for r in d.requests} == before
        assert (await service.http.get("/v1/completions")).status_code == 405


async def test_a_path_with_a_line_break_is_no_endpoint():
    """The framework's patterns let one pass at the end; it must not reach an engine's request line or a log."""
    async with fakes("d") as (d,), running(("decode", d)) as service:
        answer = await service.http.post(f"http://127.0.0.1:{service.port}/v1/completions%0A", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "bad_request")
        assert d.generations() == []


async def test_the_other_endpoints_go_whole_to_a_decode_instance():
    """Until their handoff has been tested."""
    async with fakes("p", "d") as (p, d), running(("prefill", p), ("decode", d)) as service:
        for path in ROUTED_ENDPOINTS[2:]:
            await service.http.post(path, json={"model": "tiny", "prompt": "x" * 500})
            assert path in [r.path for r in d.requests]
        assert [
            r for r in p.requests if r.path in ROUTED_ENDPOINTS[2:] and "x" * 500 in str(r.body.get("prompt"))
        ] == []
        answer = await service.http.post("/tokenize", json={"model": "tiny", "prompt": "abc"})
        assert (answer.json()["count"], answer.headers["x-disagg-path"]) == (3, "local")


async def test_s7_models_are_shown_with_all_their_fields():
    """As the engine shows them."""
    async with fakes("d") as (d,), running(("decode", d)) as service:
        card = (await service.http.get("/v1/models")).json()["data"][0]
        assert (card["id"], card["max_model_len"], card["object"]) == ("tiny", 8192, "model")


async def test_alive_ready_and_status():
    """Alive without engines; ready with one that can serve a request whole."""
    async with fakes("p", "d") as (p, d), running(("prefill", p), ("decode", d)) as service:
        assert (await service.http.get("/ready")).status_code == 200
        status = (await service.admin.get("/status")).json()
        assert [(i["id"], i["role"], i["state"], i["url"]) for i in status["instances"]] == [
            ("prefill-0", "prefill", "ready", p.url),
            ("decode-0", "decode", "ready", d.url),
        ]
        assert status["pairs"] == [{"prefill": "prefill-0", "decode": "decode-0", "state": "ready", "reason": None}]
        assert status["leases"] == []
        await d.die()
        await service.until(lambda fleet: not fleet.can_serve_whole())
        refused = await service.http.get("/ready")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_decode_instance")
        assert (await service.http.get("/health")).status_code == 200
        answer = await service.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_decode_instance")
        assert answer.headers["retry-after"]
        port = d.port
        await d.start(port)
        await service.until(lambda fleet: fleet.can_serve_whole() and fleet.settled())
        assert (await service.complete("x" * 500)).headers["x-disagg-path"] == "remote_prefill"


async def test_a_pair_that_answers_wrong_carries_nothing():
    """The self-test finds it before a client does; requests are served local, and right."""
    async with fakes("p", "d") as (p, d):
        d.pull = "corrupts"
        async with running(("prefill", p), ("decode", d)) as service:
            [status] = service.parts.brain.fleet.pairs.values()
            assert status.state is PairState.FAILED
            answer = await service.complete("x" * 500)
            assert answer.headers["x-disagg-path"] == "local"
            assert (await service.complete("x" * 500, headers=REMOTE)).status_code == 503
            d.pull = "works"
            await service.until(lambda f: [s.state for s in f.pairs.values()] == [PairState.READY])


async def test_c21_a_pair_with_two_block_sizes_is_refused_with_both():
    """The engines would accept it and answer wrong."""
    async with fakes("p") as (p,), fakes("d", block_size=64) as (d,):
        async with running(("prefill", p), ("decode", d)) as service:
            [status] = service.parts.brain.fleet.pairs.values()
            assert (status.state, "block_size" in str(status.reason)) == (PairState.REFUSED, True)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["prefill", "decode"])
async def test_c04_a_hang_up_reaches_the_engine(stream, when):
    """Whichever leg is open, streamed or not; and the leg after it is never sent."""
    async with fakes("p", "d") as (p, d), running(("prefill", p), ("decode", d)) as service:
        slow, counts = (p if when == "prefill" else d), len(d.generations())
        slow.script(Script(on="/v1/completions", head_delay_s=30))
        asking = asyncio.create_task(service.complete("x" * 500, headers=REMOTE, stream=stream))
        await service.until(lambda _: any(not r.gone.is_set() for r in slow.generations()[counts and -1 :]))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(slow.generations()[-1].gone.wait(), 1)
        await asyncio.sleep(0.05)
        assert service.parts.router.loads.leases.held() == {}
        assert p.pinned == {}
        if when == "prefill":
            assert len(d.generations()) == counts


async def test_an_error_event_before_anything_else_is_no_answer():
    """vLLM says 200 first and the error after: the client gets the other engine's stream instead."""
    async with fakes("p", "d", "e") as (p, d, e):
        async with running(("prefill", p), ("decode", d), ("decode", e)) as service:
            for engine in (d, e):
                engine.script(Script(on="/v1/completions", error_first=500))
            answer = await service.complete(headers=LOCAL, stream=True)
            assert answer.status_code == 502
            d.script(Script(on="/v1/completions", error_first=500))
            answer = await service.complete(headers=LOCAL, stream=True)
            assert answer.status_code == 200
            assert answer.text.endswith("data: [DONE]\n\n")


async def test_an_engine_lost_in_the_middle_of_a_stream_is_one_error_event():
    """Never a clean silent end."""
    async with fakes("d") as (d,), running(("decode", d)) as service:
        d.script(Script(on="/v1/completions", cut_after=3))
        answer = await service.complete(stream=True)
        events = [line for line in answer.text.split("\n\n") if line]
        assert json.loads(events[-1][6:])["error"]["code"] == "upstream_error"
        assert sum("error" in event for event in events) == 1
        assert "[DONE]" not in answer.text


async def test_an_engine_that_dies_behind_its_own_server_ends_the_stream_with_its_error():
    """vLLM writes the event itself, and [DONE] after it: that one is kept back, and the request counts as failed."""
    error = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}
    async with fakes("d") as (d,), running(("decode", d)) as service:
        d.script(Script(on="/v1/completions", error_after=(3, error)))
        answer = await service.complete(stream=True)
        events = [line for line in answer.text.split("\n\n") if line]
        assert (len(events), json.loads(events[-1][6:])) == (4, error)
        page = (await service.admin.get("/metrics")).text
        assert 'disagg_requests_total{outcome="engine_error",path="local"} 1.0' in page
        assert 'disagg_leg_failures_total{code="upstream_error",instance="decode-0"} 1.0' in page


async def test_an_engine_lost_in_the_middle_of_a_json_answer_cuts_the_connection():
    """Half an answer must not look whole."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    async with fakes("d") as (d,), running(("decode", d)) as service:
        d.script(Script(on="/v1/completions", raw=(head,)))
        with pytest.raises(httpx.HTTPError):
            await service.complete()


async def test_c06_the_limits_are_separate():
    """8 tokens over 2.4 s pass limits that the whole would exceed; a gap over the idle limit is an error event."""
    limits = {"first_byte_s": 1.5, "idle_s": 1.2}
    async with fakes("d") as (d,), running(("decode", d), limits=limits) as service:
        d.script(Script(on="/v1/completions", event_delay_s=0.3))
        assert (await service.complete(stream=True)).text.endswith("data: [DONE]\n\n")
        d.script(Script(on="/v1/completions", head_delay_s=30))
        assert (await service.complete(stream=True)).json()["error"]["code"] == "upstream_timeout"
        d.script(Script(on="/v1/completions", hang_after=2))
        answer = await service.complete(stream=True)
        assert json.loads(answer.text.split("\n\n")[-2][6:])["error"]["code"] == "upstream_timeout"


async def test_admin_tells_and_explains():
    """Metrics by registry labels, a decision without sending anything, draining."""
    async with fakes("p", "d") as (p, d), running(("prefill", p), ("decode", d)) as service:
        await service.complete("x" * 500)
        page = (await service.admin.get("/metrics")).text
        assert 'disagg_decisions_total{path="remote_prefill",reason="long_prompt"} 1.0' in page
        assert 'disagg_handoffs_total{result="sent"} 1.0' in page
        assert 'disagg_requests_total{outcome="ok",path="remote_prefill"} 1.0' in page
        assert "disagg_requests_in_flight 0.0" in page
        sent = len(d.generations())
        shown = await service.admin.post("/debug/route", json={"model": "tiny", "prompt": "y" * 300})
        explained = shown.json()
        assert [explained[key] for key in ("path", "reason", "decode", "prefill")] == [
            "remote_prefill", "long_prompt", "decode-0", "prefill-0",
        ]  # fmt: skip
        assert explained["terms"] == {"uncached_tokens": 300.0, "threshold_tokens": 256.0}
        assert explained["predicted"].keys() == {"remote_prefill"}
        assert explained["admission"]["verdict"] == "admitted"
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert (await service.admin.post("/debug/route", json=chat)).json()["path"] == "local"
        assert len(d.generations()) == sent
        assert (await service.admin.post("/drain")).json()["draining"] is True
        for refused in (await service.http.get("/ready"), await service.complete()):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


async def test_the_admin_token_is_wanted_on_every_path():
    """As a bearer, whole."""
    async with fakes("d") as (d,), running(("decode", d), router={"admin_token": "s3cret"}) as service:
        for path in ("/status", "/metrics", "/nowhere"):
            assert (await service.admin.get(path)).status_code == 401
            wrong = await service.admin.get(path, headers={"authorization": "Bearer s3cre"})
            assert wrong.json()["error"]["code"] == "unauthorized"
        good = await service.admin.get("/status", headers={"authorization": "Bearer s3cret"})
        assert good.status_code == 200


async def test_c50_no_prompt_or_key_in_logs_metrics_or_errors(caplog):
    """At the most talkative level, on good, bad and failing requests."""
    caplog.set_level("DEBUG", logger="disagg_router")
    secret, key = "canary-prompt", "canary-key"
    headers = {"authorization": f"Bearer {key}", "x-request-id": "a\tERROR forged"}
    async with fakes("p", "d") as (p, d), running(("prefill", p), ("decode", d)) as service:
        await service.complete(secret * 40, headers={**headers, **REMOTE})
        await service.complete(secret, headers=headers, max_tokens=0)
        await service.http.post("/v1/completions", content=f'{{"prompt": "{secret}', headers=headers)
        d.script(Script(on="/v1/completions", reset=True), Script(on="/v1/completions", reset=True))
        await service.complete(secret, headers=headers)
        shown = caplog.text + (await service.admin.get("/metrics")).text + (await service.admin.get("/status")).text
    assert "/v1/completions" in shown
    for canary in (secret, key, "forged"):
        assert canary not in shown


async def test_c39_label_values_never_come_from_a_client():
    """100 made-up model names leave the number of series as it was."""
    async with fakes("d") as (d,), running(("decode", d)) as service:
        await service.complete(model="warm-up")
        before = len((await service.admin.get("/metrics")).text.splitlines())
        for i in range(100):
            await service.complete(model=f"made-up-{i}", headers={"x-request-id": f"r{i}"})
        assert len((await service.admin.get("/metrics")).text.splitlines()) == before


async def test_c01_an_instance_that_dies_takes_no_requests_with_it():
    """20 requests while one of two is dead: 20 answers."""
    async with fakes("d", "e") as (d, e), running(("decode", d), ("decode", e)) as service:
        await d.die()
        answers = [await service.complete() for _ in range(20)]
        assert [a.status_code for a in answers] == [200] * 20
        await service.until(lambda f: f.instances["decode-0"].state is InstanceState.UNREACHABLE)


async def test_c12_after_a_storm_nothing_is_held():
    """Requests that succeed, fail and are left by their clients."""
    async with fakes("p", "d", "e") as (p, d, e):
        async with running(("prefill", p), ("decode", d), ("decode", e)) as service:
            kinds = [
                Script(on="/v1/c", status=500),
                Script(on="/v1/c", reset=True),
                Script(on="/v1/c", head_delay_s=0.2),
                Script(on="/v1/c", cut_after=1),
                Script(on="/v1/c", error_first=500),
            ]
            for engine in (p, d, e):
                engine.script(*(kinds * 6))

            async def one(i):
                try:
                    async with asyncio.timeout(0.1 if i % 4 == 0 else 10):
                        await service.complete("x" * 500, headers=REMOTE if i % 2 else LOCAL, stream=bool(i % 3))
                except (TimeoutError, httpx.HTTPError):
                    pass

            await asyncio.gather(*(one(i) for i in range(80)))
            assert await service.parts.router.drain(5)
            assert service.parts.router.loads.leases.held() == {}
            assert "disagg_requests_in_flight 0.0" in (await service.admin.get("/metrics")).text

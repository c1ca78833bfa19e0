"""The admin listener: what the router sees, decides and counts. Never on the public port."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import msgspec
from fastapi import FastAPI, Request, Response

from disagg_router.errors import Unauthorized
from disagg_router.interfaces import Admission, JsonObject, Reject, Reserved, Wait
from disagg_router.model import Decision
from disagg_router.observability.decisions import target_name
from disagg_router.observability.gauges import Readings
from disagg_router.observability.metrics import Metrics
from disagg_router.proxy.app import bare_app, error_response
from disagg_router.proxy.openai import CHAT, COMPLETIONS, request_id_of
from disagg_router.proxy.relay import ParseCall
from disagg_router.routing.fleet import Fleet
from disagg_router.routing.router import Router


def admin_app(
    router: Router,
    parse: ParseCall,
    metrics: Metrics,
    *,
    fleet: Callable[[], Fleet],
    token: str | None,
    readings: Readings | None = None,
) -> FastAPI:
    """With `token` set, every path wants it as a bearer. `readings`: what /status shows beside the fleet."""
    read = readings or Readings()
    app = bare_app("disagg-router admin")
    expected = f"Bearer {token}".encode()

    @app.middleware("http")
    async def authorize(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").encode()
        if token is not None and not secrets.compare_digest(given, expected):
            return error_response(Unauthorized("this listener needs the admin token as a bearer"))
        return await call_next(request)

    @app.get("/status")
    async def status() -> JsonObject:
        return describe(fleet(), router, read)

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/debug/route")
    async def debug_route(request: Request) -> Response:
        content = await request.body()
        headers = dict(request.headers)
        call = parse(_endpoint_of(content), headers, content, request_id_of(headers))
        shown = explain(*await router.decide(call.request, call.body))
        # Not the framework's encoder, which fails on the infinities that terms may hold: here they become null.
        return Response(msgspec.json.encode(shown), media_type="application/json")

    @app.post("/drain")
    async def drain() -> JsonObject:
        router.draining = True
        return describe(fleet(), router, read)

    return app


def describe(fleet: Fleet, router: Router, read: Readings) -> JsonObject:
    return {
        "pid": os.getpid(),
        "draining": router.draining,
        "ready": fleet.can_serve_whole() and not router.draining,
        "settled": fleet.settled(),
        "instances": [
            {
                "id": instance.id,
                "role": instance.role.value,
                "state": instance.state.value,
                "url": instance.url,
                "engine_id": instance.engine_id,
                "incarnation": instance.incarnation,
                "fingerprint": asdict(instance.fingerprint),
            }
            for instance in fleet.instances.values()
        ],
        "pairs": [
            {"prefill": pair.prefill, "decode": pair.decode, "state": status.state.value, "reason": status.reason}
            for pair, status in fleet.pairs.items()
        ],
        "leases": [
            {
                "kind": kind.value,
                "instance": target.instance,
                "dp_rank": target.dp_rank,
                "held": held.count,
                "bytes": held.kv_bytes,
            }
            for (kind, target), held in router.loads.leases.held().items()
        ],
        "leans": [
            {"instance": target.instance, "dp_rank": target.dp_rank, "lean": lean}
            for target, lean in (read.leans().lean.items() if read.leans else ())
        ],
        "queue_waiting": read.queue_waiting() if read.queue_waiting else None,
    }


def _endpoint_of(content: bytes) -> str:
    """A body does not say where it was meant to go; `messages` tells."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.MsgspecError:
        return COMPLETIONS  # parse() gives the error
    return CHAT if isinstance(body, dict) and "messages" in body else COMPLETIONS


def explain(decision: Decision, admission: Admission | None = None) -> JsonObject:
    """A decision with every number behind it, and what admission would say to it now; bytes and seconds."""
    return {
        "path": decision.path.value,
        "reason": decision.reason.value,
        "decode": target_name(decision.decode),
        "prefill": target_name(decision.prefill) if decision.prefill else None,
        "predicted": {path.value: it._asdict() for path, it in decision.ttft.items()},
        "chance": decision.chance,
        "gain": decision.gain,
        "terms": dict(decision.terms),
        "admission": None if admission is None else _verdict(admission),
    }


def _verdict(admission: Admission) -> JsonObject:
    match admission:
        case Reserved(claim):
            return {"verdict": "admitted", **asdict(claim)}
        case Wait(code, ready_s):
            return {"verdict": "wait", "code": code.value, "ready_s": ready_s}
        case Reject(code, retry_s):
            return {"verdict": "rejected", "code": code.value, "retry_s": retry_s}

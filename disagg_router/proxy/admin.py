"""The admin listener: what the router sees, decides and counts. Never on the public port."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import msgspec
from fastapi import FastAPI, Request, Response

from disagg_router.errors import Unauthorized
from disagg_router.interfaces import JsonObject
from disagg_router.model import Decision
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
) -> FastAPI:
    """With `token` set, every path wants it as a bearer."""
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
        return describe(fleet(), router)

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/debug/route")
    async def debug_route(request: Request) -> JsonObject:
        content = await request.body()
        headers = dict(request.headers)
        call = parse(_endpoint_of(content), headers, content, request_id_of(headers))
        return _explain(await router.decide(call.request, call.body))

    @app.post("/drain")
    async def drain() -> JsonObject:
        router.draining = True
        return describe(fleet(), router)

    return app


def describe(fleet: Fleet, router: Router) -> JsonObject:
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
            {"kind": kind.value, "instance": target.instance, "dp_rank": target.dp_rank, "held": held}
            for (kind, target), held in router.leases.held().items()
        ],
    }


def _endpoint_of(content: bytes) -> str:
    """A body does not say where it was meant to go; `messages` tells."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.MsgspecError:
        return COMPLETIONS  # parse() gives the error
    return CHAT if isinstance(body, dict) and "messages" in body else COMPLETIONS


def _explain(decision: Decision) -> JsonObject:
    return {
        "path": decision.path.value,
        "reason": decision.reason.value,
        "decode": decision.decode.instance,
        "prefill": decision.prefill.instance if decision.prefill else None,
        "terms": dict(decision.terms),
    }

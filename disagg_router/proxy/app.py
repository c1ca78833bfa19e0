"""The public listener: an allow-list of inference paths, /health and /ready. Everything else is 404."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from disagg_router.errors import (
    BadRequest,
    Draining,
    NoDecodeInstance,
    NotServed,
    RequestError,
    UpstreamRefused,
    WrongMethod,
)
from disagg_router.interfaces import JsonObject
from disagg_router.proxy.openai import ROUTED_ENDPOINTS, error_body
from disagg_router.proxy.relay import RoutedEndpoint
from disagg_router.routing.fleet import Fleet


def error_response(error: RequestError) -> Response:
    if isinstance(error, UpstreamRefused):
        return Response(error.body, error.status, media_type=error.content_type)
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return Response(error_body(error), error.status, headers, "application/json")


def bare_app(title: str) -> FastAPI:
    """FastAPI without pages of its own, whose errors have the OpenAI shape."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    async def on_http_error(_: Request, exc: Exception) -> Response:
        status = exc.status_code if isinstance(exc, HTTPException) else 500
        kind = {404: NotServed, 405: WrongMethod}.get(status, BadRequest)
        return error_response(kind("this path is not served here" if status == 404 else "not this way"))

    async def on_request_error(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestError)
        return error_response(exc)

    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestError, on_request_error)
    return app


def public_app(
    endpoint: RoutedEndpoint,
    *,
    fleet: Callable[[], Fleet],
    draining: Callable[[], bool],
    models: Callable[[], list[JsonObject]],
) -> FastAPI:
    """`models` gives the model cards that the engines show."""
    app = bare_app("disagg-router")
    for path in ROUTED_ENDPOINTS:
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))

    @app.get("/health")
    async def health() -> Mapping[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Mapping[str, str]:
        if draining():
            raise Draining("this router is shutting down")
        if not fleet().can_serve_whole():
            raise NoDecodeInstance("no instance can serve a request whole", retry_after_s=1)
        return {"status": "ready"}

    @app.get("/v1/models")
    async def list_models() -> JsonObject:
        return {"object": "list", "data": models()}

    return app

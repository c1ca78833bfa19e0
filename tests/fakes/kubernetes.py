"""As much of a Kubernetes API server as a list and a watch need, with its failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

Json = dict[str, Any]

PODS, SLICES = "pods", "endpointslices"
PATHS = {PODS: "/api/v1/namespaces/{space}/pods", SLICES: "/apis/discovery.k8s.io/v1/namespaces/{space}/endpointslices"}


def pod(
    name: str,
    *,
    ip: str = "10.0.0.1",
    labels: str = "app=vllm",
    ready: bool = True,
    uid: str = "u1",
    restarts: int = 0,
    terminating: bool = False,
) -> Json:
    """As `kubectl get pod -o json` shows one, fields that nobody reads left out but for a few."""
    leaving = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if terminating else {}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "uid": uid, "labels": _labels(labels), **leaving},
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
            "containerStatuses": [{"name": "vllm", "restartCount": restarts}],
        },
    }


def endpoint(pod: str, ip: str = "10.0.0.1", **conditions: bool | None) -> Json:
    """`conditions` are ready, serving, terminating."""
    return {"addresses": [ip], "conditions": conditions, "targetRef": {"kind": "Pod", "name": pod, "uid": "u1"}}


def endpoint_slice(name: str, service: str, *endpoints: Json, port: int = 8000, family: str = "IPv4") -> Json:
    """With the port under the name `http`; a slice without endpoints holds null, as the real ones do."""
    return {
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }


def _labels(text: str) -> dict[str, str]:
    return dict(term.split("=") for term in text.split(",") if term)


@dataclass(slots=True)
class _Change:
    version: int
    plural: str
    old: Json | None
    new: Json | None


@dataclass
class FakeKubernetes:
    """`refuse` is the status of every answer; `expired` ends every watch with 410, as its first event or its status;
    one that `hangs` answers nothing."""

    token: str | None = None
    refuse: int | None = None
    expired: str | None = None  # "event" | "status"
    hangs: bool = False
    port: int = 0
    lists: int = 0
    watches: int = 0  # open now
    most_watches: int = 0
    _version: int = 7
    _objects: dict[str, dict[str, Json]] = field(default_factory=lambda: {PODS: {}, SLICES: {}})
    _log: list[_Change] = field(default_factory=list)
    _moved: asyncio.Event = field(default_factory=asyncio.Event)
    _epoch: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def put(self, new: Json, *, told: bool = True) -> None:
        """Create or change. Not `told`: no watch ever hears of it."""
        plural = PODS if new["kind"] == "Pod" else SLICES
        self._change(plural, new["metadata"]["name"], new, told)

    def delete(self, plural: str, name: str, *, told: bool = True) -> None:
        self._change(plural, name, None, told)

    def end_watches(self) -> None:
        self._epoch += 1
        self._wake()

    def _change(self, plural: str, name: str, new: Json | None, told: bool) -> None:
        self._version += 1
        old = self._objects[plural].pop(name, None)
        if new is not None:
            self._objects[plural][name] = new
        if told:
            self._log.append(_Change(self._version, plural, old, new))
            self._wake()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def _refusal(self, request: Request) -> Response | None:
        authorised = self.token is None or request.headers.get("authorization") == f"Bearer {self.token}"
        status = self.refuse or (None if authorised else 401)
        if status is None and self.expired == "status" and "watch" in request.query_params:
            status = 410
        return Response(json.dumps(_status(status)), status) if status else None

    async def _answer(self, plural: str, request: Request) -> Response:
        if self.hangs:
            await asyncio.sleep(60)
        if (refusal := self._refusal(request)) is not None:
            return refusal
        selector = _labels(request.query_params.get("labelSelector", ""))
        if "watch" in request.query_params:
            events = self._events(plural, selector, int(request.query_params["resourceVersion"]))
            return StreamingResponse(events, media_type="application/json")
        self.lists += 1
        items = [one for one in self._objects[plural].values() if _matches(one, selector)]
        return Response(json.dumps({"metadata": {"resourceVersion": str(self._version)}, "items": items}))

    async def _events(self, plural: str, selector: dict[str, str], version: int) -> AsyncIterator[str]:
        epoch, self.watches = self._epoch, self.watches + 1
        self.most_watches = max(self.most_watches, self.watches)
        try:
            if self.expired == "event":
                yield _event("ERROR", _status(410))
                return
            yield _event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}})
            while epoch == self._epoch:
                moved = self._moved
                for change in [one for one in self._log if one.plural == plural and one.version > version]:
                    version = change.version
                    if event := _as_seen(change, selector):
                        yield event
                await moved.wait()
        finally:
            self.watches -= 1


def _as_seen(change: _Change, selector: dict[str, str]) -> str | None:
    """To a watch with a selector, what stops matching is deleted and what begins to match is added."""
    old = change.old if change.old and _matches(change.old, selector) else None
    new = change.new if change.new and _matches(change.new, selector) else None
    if new is not None:
        return _event("MODIFIED" if old else "ADDED", new)
    return _event("DELETED", old) if old else None


def _matches(one: Json, selector: dict[str, str]) -> bool:
    return selector.items() <= one["metadata"]["labels"].items()


def _event(type_: str, object_: Json) -> str:
    return json.dumps({"type": type_, "object": object_}) + "\n"


def _status(code: int) -> Json:
    words = {403: 'pods is forbidden: User "system:serviceaccount:ai:router" cannot list resource "pods"'}
    return {"kind": "Status", "status": "Failure", "message": words.get(code, "no"), "code": code}


@asynccontextmanager
async def serving(api: FakeKubernetes, port: int = 0, **tls: str) -> AsyncIterator[FakeKubernetes]:
    """`tls`: uvicorn's ssl_certfile and ssl_keyfile."""
    app = FastAPI()

    @app.get(PATHS[PODS])
    async def pods(request: Request) -> Response:
        return await api._answer(PODS, request)

    @app.get(PATHS[SLICES])
    async def slices(request: Request) -> Response:
        return await api._answer(SLICES, request)

    config = uvicorn.Config(app, port=port, lifespan="off", log_level="critical", timeout_graceful_shutdown=0, **tls)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    api.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield api
    finally:
        server.should_exit = server.force_exit = True
        api.end_watches()
        await running

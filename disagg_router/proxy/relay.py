"""One routed request as an ASGI application: body in, router, bytes out, and an eye on the client's hang-up.

Not a FastAPI handler: the framework would have sent 200 before the policy could say no, and would not tell when the
client leaves while an engine is still being waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from disagg_router.errors import (
    BodyTooLarge,
    Internal,
    NotServed,
    RequestError,
    SlowBody,
    UpstreamError,
    UpstreamRefused,
)
from disagg_router.interfaces import Clock
from disagg_router.model import Decision
from disagg_router.observability.requests import RequestRecord, RequestRecorder
from disagg_router.proxy.openai import ROUTED_ENDPOINTS, ClientCall, error_body, request_id_of
from disagg_router.proxy.streams import ErrorWatch, FirstContent, error_event, tokens_in, tokens_said
from disagg_router.routing.router import Routed, Router

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]
ParseCall = Callable[[str, dict[str, str], bytes, str], ClientCall]

_STREAM_HEADERS: tuple[Header, ...] = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class ClientGone(Exception):
    """The client hung up. Nobody is left to tell."""


class RoutedEndpoint:
    """Serves one endpoint through the router."""

    def __init__(
        self,
        router: Router,
        parse: ParseCall,
        recorder: RequestRecorder,
        *,
        body_limit_bytes: int,
        body_idle_s: float,
        clock: Clock,
    ) -> None:
        self._router, self._parse, self._recorder, self._clock = router, parse, recorder, clock
        self._body_limit_bytes, self._body_idle_s = body_limit_bytes, body_idle_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        record = self._recorder.begin(_known_path(scope), request_id_of(headers), self._clock.now_s())
        try:
            await self._serve(headers, receive, _Answer(send, record, self._body_idle_s), record)
        except ClientGone:
            record.outcome = "client_gone"
        except asyncio.CancelledError:
            record.outcome = "cut"  # the server is going down and has waited long enough
            raise
        finally:
            self._recorder.end(record, self._clock.now_s())

    async def _serve(self, headers: dict[str, str], receive: Receive, out: _Answer, record: RequestRecord) -> None:
        try:
            if record.endpoint not in ROUTED_ENDPOINTS:
                raise NotServed("this path is not served here")
            content = await self._read_body(headers, receive)
            call = self._parse(record.endpoint, headers, content, record.request_id)
            await _until_gone(self._answer(call, out, record), receive, out)
        except RequestError as exc:
            await out.refuse(exc)
        except ClientGone:
            raise
        except Exception:
            # Logged with its traceback by the server; the client must not learn what was in it.
            await out.refuse(Internal("the router failed on this request"))
            raise

    async def _answer(self, call: ClientCall, out: _Answer, record: RequestRecord) -> None:
        async with self._router.route(call.request, call.body, call.headers, record) as routed:
            await out.start(routed)
            try:
                await (self._relay_stream(routed, out, record) if call.request.stream else _relay(routed, out))
            except UpstreamError as exc:
                self._router.failed(routed.decision.decode, exc)
                await out.lost(exc, streamed=call.request.stream)
                return
            routed.complete = record.outcome == "ok"
            await out.finish()

    async def _relay_stream(self, routed: Routed, out: _Answer, record: RequestRecord) -> None:
        stream = routed.stream
        assert stream is not None
        first, errors, now_s = FirstContent(), ErrorWatch(), self._clock.now_s
        before = last = b""
        try:
            async for chunk in routed.response.chunks():
                if first.done:
                    stream.count(tokens_in(chunk), now_s())
                elif first.feed(chunk):
                    record.first_content_s = now_s()
                    stream.count(1, record.first_content_s)
                before, last = last, chunk
                await out.send(errors.feed(chunk))
                if errors.ended:
                    record.outcome = "engine_error"
                    self._router.failed(
                        routed.decision.decode, UpstreamError("the engine failed in the middle of a stream")
                    )
                    return
        finally:
            record.last_content_s, record.max_gap_s = stream.last_s, stream.max_gap_s
            record.output_tokens = tokens_said(before + last) or stream.tokens

    async def _read_body(self, headers: dict[str, str], receive: Receive) -> bytes:
        """Raises BodyTooLarge before reading all of it, RequestError when the client is too slow, ClientGone."""
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._body_limit_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        received_bytes = 0
        while True:
            try:
                async with asyncio.timeout(self._body_idle_s):
                    message = await receive()
            except TimeoutError as exc:
                raise SlowBody(f"no byte of the body came for {self._body_idle_s:g} s") from exc
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            received_bytes += len(part)
            if received_bytes > self._body_limit_bytes:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than limits.body_mb ({self._body_limit_bytes / 2**20:g} MiB)")


class _Answer:
    """The client's side of one request: head first, then bytes, and exactly one kind of end."""

    def __init__(self, send: Send, record: RequestRecord, idle_s: float) -> None:
        """A client that takes nothing for `idle_s` is taken for gone: what it holds is others' room."""
        self._to_client, self._record, self._idle_s = send, record, idle_s
        self._started = False
        self.complete = False

    async def start(self, routed: Routed) -> None:
        response = routed.response
        content_type = response.headers.get("content-type", "application/json")
        headers = [(b"content-type", content_type.encode("latin-1"))]
        if content_type.startswith("text/event-stream"):
            headers += _STREAM_HEADERS
        elif length := response.headers.get("content-length"):
            headers.append((b"content-length", length.encode("latin-1")))
        await self._head(response.status, headers)

    async def send(self, chunk: bytes) -> None:
        self._record.sent_bytes += len(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self) -> None:
        self.complete = True
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: RequestError) -> None:
        """Instead of an answer. After the head has gone there is nothing left to say."""
        self._record.outcome = error.code.value
        if self._started:
            return
        headers = [(b"content-type", b"application/json")]
        body = error_body(error)
        if isinstance(error, UpstreamRefused):
            headers, body = [(b"content-type", error.content_type.encode("latin-1"))], error.body
            self._record.outcome = "refused"
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        await self._head(error.status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._send({"type": "http.response.body", "body": body})

    async def lost(self, error: RequestError, *, streamed: bool) -> None:
        """The engine went away in the middle: a stream ends with one error event. Anything else is left unfinished,
        upon which the server cuts the connection: a clean end would pass half an answer off as a whole one."""
        self._record.outcome = "lost"
        if streamed:
            await self.send(error_event(error))
            await self.finish()

    async def _send(self, message: dict[str, Any]) -> None:
        """Raises ClientGone."""
        try:
            async with asyncio.timeout(self._idle_s):
                await self._to_client(message)
        except TimeoutError as exc:
            raise ClientGone from exc

    async def _head(self, status: int, headers: list[Header]) -> None:
        self._started = True
        self._record.status = status
        headers.append((b"x-request-id", self._record.request_id.encode()))
        headers += _decision_headers(self._record.decision)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


async def _relay(routed: Routed, out: _Answer) -> None:
    async for chunk in routed.response.chunks():
        await out.send(chunk)


async def _until_gone(work: Awaitable[None], receive: Receive, out: _Answer) -> None:
    """Run `work`, cancelled at once when the client leaves before its answer is complete. Raises ClientGone then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if out.complete:  # what looks like leaving is the server's word for the end of the answer
            await working
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    if working.cancelled():
        raise ClientGone
    working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _known_path(scope: Scope) -> str:
    """The endpoint, or a word for anything else: the router's pattern lets a path with a line break at its end pass,
    and what a client writes there belongs neither into a log nor to an engine."""
    path: str = scope["path"]
    return path if path in ROUTED_ENDPOINTS else "unknown"


def _decision_headers(decision: Decision | None) -> list[Header]:
    if decision is None:
        return []
    headers = [(b"x-disagg-path", decision.path.encode()), (b"x-disagg-decode", decision.decode.instance.encode())]
    if decision.prefill is not None:
        headers.append((b"x-disagg-prefill", decision.prefill.instance.encode()))
    return headers

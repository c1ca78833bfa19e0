"""Good answer or not: statuses and a stream's first event, mapped into the error tree."""

from __future__ import annotations

import asyncio
import re

import msgspec

from disagg_router.engines.upstream import UpstreamResponse
from disagg_router.errors import UpstreamError, UpstreamRefused

_EVENT_END = re.compile(rb"\r?\n\r?\n")
_FIRST_EVENT_BYTES = 8 * 1024 * 1024  # the first event may carry the prompt's token ids and logprobs


async def checked(response: UpstreamResponse, limit_s: float) -> None:
    """Return when the answer is good as far as can be told before any of it goes on.

    `limit_s` is what is left for a stream's first event. Raises UpstreamRefused for a 4xx, UpstreamError for
    anything else that is not a 2xx and for a stream that begins with an error event.
    """
    if 400 <= response.status < 500:
        content_type = response.headers.get("content-type", "application/json")
        raise UpstreamRefused(response.status, content_type, await response.read())
    if not 200 <= response.status < 300:
        raise UpstreamError(f"the engine answered {response.status}")
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        _raise_error_event(await _first_event(response, limit_s))


async def _first_event(response: UpstreamResponse, limit_s: float) -> bytes:
    """The data of the first event that has any; it stays in the response."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + limit_s
    seen, scanned = b"", 0
    while True:
        for end in _EVENT_END.finditer(seen, scanned):
            data = _data(seen[scanned : end.start()])
            scanned = end.end()
            if data is not None:
                return data
        more = await response.peek(end_s - loop.time())
        if len(more) == len(seen):
            raise UpstreamError("the engine's stream ended before its first event")
        if len(more) > _FIRST_EVENT_BYTES:
            raise UpstreamError(f"the engine's first event exceeds {_FIRST_EVENT_BYTES} bytes")
        seen = more


def _data(event: bytes) -> bytes | None:
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _ErrorEvent(msgspec.Struct):
    error: _ErrorDetail | None = None


def _raise_error_event(data: bytes) -> None:
    try:
        error = msgspec.json.decode(data, type=_ErrorEvent).error
    except msgspec.MsgspecError:
        return  # [DONE], or something the client will make sense of
    if error is None:
        return
    if isinstance(error.code, int) and 400 <= error.code < 500:
        raise UpstreamRefused(error.code, "application/json", data)
    raise UpstreamError(f"the engine failed: {error.message[:200]}")

"""The few things the relay looks at in an event stream: where the content starts, and how to end it with an error."""

from __future__ import annotations

import msgspec

from disagg_router.errors import RequestError
from disagg_router.proxy.openai import error_body

LOOK_AT_BYTES = 65_536  # content that has not started by then is not looked for any longer


class FirstContent:
    """Fed the start of a stream until the first event with content has passed; then it costs nothing.

    A chat stream begins with an event that only names the role: that is no token, and no TTFT.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._looked_at = 0
        self.done = False

    def feed(self, chunk: bytes) -> bool:
        """True when this chunk brought the first content."""
        self._looked_at += len(chunk)
        *events, self._pending = (self._pending + chunk).split(b"\n\n")
        if any(_has_content(event) for event in events):
            self.done = True
            return True
        self.done = self._looked_at > LOOK_AT_BYTES
        return False


class ErrorWatch:
    """Finds the error event with which vLLM ends a stream whose engine died behind its API server. It writes [DONE]
    after it, so that a client which stops there takes half an answer for a whole one: what follows is kept back.

    The mark cannot stand in content, where quotes are escaped.
    """

    _MARK = b'data: {"error"'

    def __init__(self) -> None:
        self._tail = b""
        self._ending = False
        self.ended = False  # the error event is complete; nothing more may go out

    def feed(self, chunk: bytes) -> bytes:
        """What of this chunk goes to the client."""
        start = 0
        if not self._ending:
            seen = self._tail + chunk
            at = seen.find(self._MARK)
            if at < 0:
                self._tail = seen[-len(self._MARK) + 1 :]
                return chunk
            self._ending = True
            start = max(0, at - len(self._tail))
            self._tail = b""
        end = (self._tail + chunk).find(b"\n\n", start)
        if end < 0:
            self._tail = chunk[-1:]
            return chunk
        self.ended = True
        return chunk[: end + 2 - len(self._tail)]


def tokens_in(chunk: bytes) -> int:
    """Events that end in this chunk: vLLM sends one for each token, and one that says [DONE]."""
    return chunk.count(b"\n\n") - chunk.endswith(b"data: [DONE]\n\n")


def tokens_said(end: bytes) -> int | None:
    """What the engine's own usage says of the answer, where the client asked for it: `end` is how the stream ended.
    Events are not tokens: an engine that is ahead of its reader puts several into one."""
    for event in reversed(end.split(b"\n\n")):
        if event.startswith(b"data: {") and b'"usage"' in event:
            try:
                return msgspec.json.decode(event[6:], type=_Told).usage.completion_tokens
            except msgspec.MsgspecError:
                return None
    return None


def error_event(error: RequestError) -> bytes:
    """The last event of a stream whose engine was lost. It starts with the end of whatever event was cut."""
    return b"\n\ndata: " + error_body(error) + b"\n\n"


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Told(msgspec.Struct):
    usage: _Usage


def _has_content(event: bytes) -> bool:
    if not event.startswith(b"data: {"):
        return False
    try:
        choices = msgspec.json.decode(event[6:]).get("choices") or []
    except msgspec.MsgspecError:
        return False
    for choice in choices:
        delta = choice.get("delta") or {}
        if choice.get("text") or any(value for key, value in delta.items() if key != "role"):
            return True
    return False

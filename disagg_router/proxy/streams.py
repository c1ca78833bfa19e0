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


def error_event(error: RequestError) -> bytes:
    """The last event of a stream whose engine was lost. It starts with the end of whatever event was cut."""
    return b"\n\ndata: " + error_body(error) + b"\n\n"


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

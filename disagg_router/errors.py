"""The error tree. Foreign errors are mapped into it at each boundary with `from exc`.

DisaggError
├── ConfigError            exit 2: a file, key or value the operator must change
├── LaunchError            exit 1: something could not be started, or was lost
├── PairTestFailed         why a pair must not carry traffic
├── NotUnderstood          a prompt, or a model's tokenizer, that only the engine can read
└── RequestError           becomes an OpenAI-shaped answer with `status` and `code`
    ├── BadRequest             400 bad_request
    │   ├── NotServed          404
    │   ├── WrongMethod        405
    │   ├── SlowBody           408
    │   └── BodyTooLarge       413
    ├── Unauthorized           401 unauthorized
    ├── ModelNotFound          404 model_not_found
    ├── QueueFull              429 queue_full
    ├── NoRoom                 429 decode_full, link_full or prefill_full; 503 once max_wait_s is over
    ├── NoDecodeInstance       503 no_decode_instance
    ├── NoPrefillInstance      503 no_prefill_instance
    ├── Draining               503 draining
    ├── Internal               500 internal
    └── UpstreamError          502 upstream_error
        ├── UpstreamTimeout    504 upstream_timeout
        ├── UpstreamUnreachable  no connection was made: the engine never saw the request
        └── UpstreamRefused    the engine's own 4xx, passed on byte for byte
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class ErrorCode(StrEnum):
    """Every `error.code` a client can see."""

    BAD_REQUEST = "bad_request"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_TOO_LONG = "context_too_long"
    UNAUTHORIZED = "unauthorized"
    RATE_LIMITED = "rate_limited"
    QUEUE_FULL = "queue_full"
    DECODE_FULL = "decode_full"
    LINK_FULL = "link_full"
    PREFILL_FULL = "prefill_full"
    NO_DECODE_INSTANCE = "no_decode_instance"
    NO_PREFILL_INSTANCE = "no_prefill_instance"
    DRAINING = "draining"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    INTERNAL = "internal"


_FULL: Mapping[ErrorCode, str] = MappingProxyType(
    {
        ErrorCode.DECODE_FULL: "the room to decode this request",
        ErrorCode.LINK_FULL: "the link that would carry this prompt's KV",
        ErrorCode.PREFILL_FULL: "the room to prefill this request",
    }
)


class DisaggError(Exception):
    """Root of everything this project raises on purpose."""


class ConfigError(DisaggError):
    """Wrong use: one sentence that says what to change. The CLI exits with 2."""


class LaunchError(DisaggError):
    """Something could not be started or was lost: one sentence. The CLI exits with 1."""


class PairTestFailed(DisaggError):
    """Why a pair must not carry traffic: one line."""


class NotUnderstood(DisaggError):
    """Only the engine can say what prompt this makes: it is asked."""


class RequestError(DisaggError):
    """An answer other than 200 that the router itself gives.

    `retry_after_s` becomes the Retry-After header when set; `param` names the offending field.
    """

    status = 500
    code = ErrorCode.INTERNAL

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(RequestError):
    status = 400
    code = ErrorCode.BAD_REQUEST


class NotServed(BadRequest):
    status = 404


class WrongMethod(BadRequest):
    status = 405


class SlowBody(BadRequest):
    status = 408


class BodyTooLarge(BadRequest):
    status = 413


class Unauthorized(RequestError):
    status = 401
    code = ErrorCode.UNAUTHORIZED


class ModelNotFound(RequestError):
    status = 404
    code = ErrorCode.MODEL_NOT_FOUND


class QueueFull(RequestError):
    status = 429
    code = ErrorCode.QUEUE_FULL


class NoRoom(RequestError):
    """`code` says what is full. `retry_s`: when it is predicted to be worth another try; `waited`: this request has
    waited for as long as it may."""

    status = 429

    def __init__(self, code: ErrorCode, retry_s: float, *, waited: bool = False) -> None:
        after_s = whole_seconds(retry_s)
        reason = "still after the longest wait" if waited else "and is not predicted to be free in time"
        message = f"{_FULL.get(code, 'what this request needs')} is taken {reason}: try again in {after_s} s"
        super().__init__(message, retry_after_s=after_s)
        self.code = code
        if waited:
            self.status = 503


class NoDecodeInstance(RequestError):
    status = 503
    code = ErrorCode.NO_DECODE_INSTANCE


class NoPrefillInstance(RequestError):
    status = 503
    code = ErrorCode.NO_PREFILL_INSTANCE


class Draining(RequestError):
    status = 503
    code = ErrorCode.DRAINING


class Internal(RequestError):
    """A fault of ours; the message never carries the request."""


class UpstreamError(RequestError):
    """An engine failed before it sent anything that reached the client."""

    status = 502
    code = ErrorCode.UPSTREAM_ERROR


class UpstreamTimeout(UpstreamError):
    status = 504
    code = ErrorCode.UPSTREAM_TIMEOUT


class UpstreamUnreachable(UpstreamError):
    """No connection was made, so the engine never saw the request and another may serve it."""


class UpstreamRefused(UpstreamError):
    """The engine's own refusal of this request (4xx): passed on, never retried."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(f"the engine answered {status}")
        self.status = status
        self.content_type = content_type
        self.body = body


def whole_seconds(seconds: float) -> int:
    """As a Retry-After header has it: 1 to an hour."""
    return math.ceil(min(max(seconds, 1.0), 3600.0))

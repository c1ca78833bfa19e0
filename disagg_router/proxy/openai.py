"""What a client may send, and what of it goes on: OpenAI-shaped bodies in, an InferenceRequest and a clean body out."""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec

from disagg_router.body import value_of
from disagg_router.errors import BadRequest, ModelNotFound, RequestError
from disagg_router.model import Body, InferenceRequest, Path, Slo

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# Served whole by one instance until their handoff has been tested.
WHOLE_ENDPOINTS = ("/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize", "/detokenize")
ROUTED_ENDPOINTS = (COMPLETIONS, CHAT, *WHOLE_ENDPOINTS)

# Fields with which a client could steer the engines: a malformed kv_transfer_params kills the decode engine, a
# well-formed one reads another request's KV.
_INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params", "request_id", "mm_payload")
# Inside vllm_xargs this one too: it makes an engine announce blocks again that it announced before.
_INTERNAL_XARGS = (*_INTERNAL_FIELDS, "kv_cache_report_mode")
# Of the client's headers only these reach an engine.
_FORWARDED_HEADERS = ("authorization", "traceparent", "tracestate")
_MOST_TOKENS = 2**31  # what is larger is no limit
_LEAST_MS = 0.1  # of an objective; a hundredth of what any engine needs, and what divides by it stays finite
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# Shapes that stay whole: their answer needs the prompt's own forward pass, several sequences, or the engine's refusal
# of one token of output.
_WHOLE_IF_TRUE = ("echo", "use_beam_search", "prompt_embeds", "suffix", "structured_outputs", "response_format")
_WHOLE_IF_SET = ("prompt_logprobs",)


@dataclass(frozen=True, slots=True)
class ClientCall:
    """One request, taken apart. `headers` are those that go on to the engines."""

    request: InferenceRequest
    body: Body
    headers: tuple[tuple[str, str], ...]


def request_id_of(headers: Mapping[str, str]) -> str:
    """What the client sees as x-request-id: its own, if it is one, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def parse_call(
    endpoint: str,
    headers: Mapping[str, str],
    content: bytes,
    request_id: str,
    *,
    served_name: str,
    adapters: Callable[[], Collection[str]],
    slo: Slo,
    allow_path_override: bool,
) -> ClientCall:
    """Raises BadRequest or ModelNotFound. Header names are lower case."""
    body = _clean(_json_object(content))
    model = value_of(body, "model")
    named = model in (None, "", served_name) or (isinstance(model, str) and model in adapters())
    if not named:
        raise ModelNotFound(
            f"the model {_quoted(model)} does not exist: this router serves {served_name}", param="model"
        )
    stream = value_of(body, "stream")
    if stream not in (None, True, False):
        raise BadRequest("stream must be true or false", param="stream")
    splittable = endpoint in (COMPLETIONS, CHAT) and not _stays_whole(endpoint, body)
    request = InferenceRequest(
        # A client may repeat its ids; the engines must not see two clients' requests under one.
        id=f"{request_id}-{secrets.token_hex(4)}",
        endpoint=endpoint,
        stream=bool(stream),
        splittable=splittable,
        countable=splittable or _has_text(endpoint, body),
        max_output_tokens=_max_output_tokens(body),
        slo=_slo(headers, slo),
        priority=_priority(headers),
        forced_path=_forced_path(headers) if allow_path_override else None,
    )
    forwarded = [(name, headers[name]) for name in _FORWARDED_HEADERS if name in headers]
    forwarded.append(("x-request-id", request.id))
    return ClientCall(request, body, tuple(forwarded))


def error_body(error: RequestError) -> bytes:
    """The OpenAI shape of an error the router itself gives."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    detail = {"message": error.message, "type": kind, "param": error.param, "code": error.code.value}
    return msgspec.json.encode({"error": detail})


def _json_object(content: bytes) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise BadRequest("the body must be one JSON object") from exc
    except RecursionError as exc:
        raise BadRequest("the body is nested too deeply") from exc


def _clean(body: dict[str, msgspec.Raw]) -> Body:
    clean: dict[str, object] = {key: value for key, value in body.items() if key not in _INTERNAL_FIELDS}
    if "vllm_xargs" in clean:  # vLLM lays these over the same dict that carries kv_transfer_params
        xargs = value_of(clean, "vllm_xargs")
        if isinstance(xargs, dict):
            clean["vllm_xargs"] = {key: value for key, value in xargs.items() if key not in _INTERNAL_XARGS}
    return clean


def _stays_whole(endpoint: str, body: Body) -> bool:
    if any(value_of(body, key) for key in _WHOLE_IF_TRUE) or any(
        value_of(body, key) is not None for key in _WHOLE_IF_SET
    ):
        return True
    if any(value_of(body, key) not in (None, 1) for key in ("n", "best_of")):
        return True
    if value_of(body, "tool_choice") not in (None, "auto", "none"):
        return True
    return endpoint == COMPLETIONS and not _single_prompt(body)


def _single_prompt(body: Body) -> bool:
    """A text, or one list of token ids. The ids are not looked at: the engine does."""
    prompt = body.get("prompt")
    raw = bytes(prompt) if isinstance(prompt, msgspec.Raw) else b""
    return raw.startswith(b'"') or (raw.startswith(b"[") and raw[1:].lstrip()[:1].isdigit())


def _has_text(endpoint: str, body: Body) -> bool:
    if endpoint == COMPLETIONS:
        return "prompt" in body and value_of(body, "prompt_embeds") is None
    return endpoint == CHAT and "messages" in body


def _max_output_tokens(body: Body) -> int | None:
    """A limit that is none, or nonsense, is left to the engine."""
    given = [value_of(body, key) for key in ("max_completion_tokens", "max_tokens")]
    limits = [limit for limit in given if type(limit) is int and 0 <= limit <= _MOST_TOKENS]
    return limits[0] if limits else None


def _slo(headers: Mapping[str, str], default: Slo) -> Slo:
    def seconds(name: str, otherwise: float) -> float:
        if name not in headers:
            return otherwise
        try:
            value = float(headers[name])
        except ValueError:
            value = -1.0
        if not _LEAST_MS <= value < float("inf"):
            raise BadRequest(f"{name} must be a number of milliseconds, {_LEAST_MS:g} or more", param=name)
        return value / 1000

    return Slo(
        ttft_s=seconds("x-slo-ttft-ms", default.ttft_s),
        tpot_s=seconds("x-slo-tpot-ms", default.tpot_s),
        max_gap_s=seconds("x-slo-max-gap-ms", default.max_gap_s),
    )


def _priority(headers: Mapping[str, str]) -> int:
    try:
        return int(headers.get("x-priority", "0"))
    except ValueError as exc:
        raise BadRequest("x-priority must be a whole number", param="x-priority") from exc


def _forced_path(headers: Mapping[str, str]) -> Path | None:
    name = headers.get("x-disagg-path")
    if name is None:
        return None
    try:
        return Path(name)
    except ValueError as exc:
        raise BadRequest(f"x-disagg-path must be one of {', '.join(Path)}", param="x-disagg-path") from exc


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

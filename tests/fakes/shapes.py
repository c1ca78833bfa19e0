"""JSON answers as vLLM 0.32.0 gives them.

Key sets and header names were compared with a running vLLM 0.32.0 (CPU, NIXL pull) for: /version, /v1/models,
/tokenize, completions and chat completions (unary; streamed with and without usage; with and without
return_token_ids and logprobs), a prefill answer's kv_transfer_params, and the errors for an unknown model, a prompt
over the context, max_tokens 0 and an unknown path. Values are made up; of /metrics only what the router reads is here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]
FINGERPRINT = "vllm-0.32.0-758ccbc7"
_CREATED_S = 1_795_976_431
_FIRST_BYTE_ID = 3  # the tokenizer: one token per byte, after three special ones


def key_shape(value: object) -> object:
    """The keys of a JSON value at every depth, with lists reduced to their first item and leaves to nothing."""
    if isinstance(value, Mapping):
        return {key: key_shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [key_shape(value[0])] if value and isinstance(value[0], (Mapping, list)) else []
    return None


def encode_text(text: str) -> list[int]:
    return [byte + _FIRST_BYTE_ID for byte in text.encode()]


def decode_ids(ids: Sequence[int]) -> str:
    return bytes((i - _FIRST_BYTE_ID) % 256 for i in ids).decode("latin-1")


def chat_text(body: Json) -> str:
    tools = "".join(f"tool: {tool['function']['name']}\n" for tool in body.get("tools") or [])
    turns = "".join(f"{m['role']}: {m['content']}\n" for m in body["messages"])
    return tools + turns + ("assistant: " if body.get("add_generation_prompt", True) else "")


def output_ids(prompt_ids: Sequence[int], count: int) -> list[int]:
    """What the fake model answers: letters, determined by the whole prompt."""
    seed = hashlib.sha256(repr(list(prompt_ids)).encode()).digest()
    letters = (hashlib.sha256(seed + i.to_bytes(4, "big")).digest()[0] % 26 for i in range(count))
    return [_FIRST_BYTE_ID + ord("a") + letter for letter in letters]


def error(status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def usage(prompt: int, completion: int, *, streamed: bool = False) -> Json:
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return counts if streamed else counts | {"prompt_tokens_details": None, "completion_tokens_details": None}


def event_sources(port: int | None) -> Json:
    """Of an engine that publishes its KV events at `port` and replays them at the next, or of one that does not."""
    if port is None:
        return {}
    bound = {"endpoint": f"tcp://[::ffff:127.0.0.1]:{port}", "replay_endpoint": f"tcp://127.0.0.1:{port + 1}"}
    limits = {"buffer_steps": 10000, "hwm": 100000, "max_queue_size": 100000, "topic": "kv@decode-0"}
    return {"0": {"enable_kv_cache_events": True, "publisher": "zmq", **bound, **limits}}


def models(served_name: str, root: str, max_model_len: int) -> Json:
    permission = {
        "id": "modelperm-8cb0c6f23fbe6ccc",
        "object": "model_permission",
        "created": _CREATED_S,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": served_name,
        "object": "model",
        "created": _CREATED_S,
        "owned_by": "vllm",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
    return {"object": "list", "data": [card]}


class Answer:
    """One generation's answers, unary or as events."""

    def __init__(
        self,
        request_id: str,
        chat: bool,
        body: Json,
        prompt_ids: list[int],
        out_ids: list[int],
        logprob_shift: float = 0.0,
    ) -> None:
        self._chat = chat
        self._shift = logprob_shift
        self._model = body["model"]
        self._with_ids = bool(body.get("return_token_ids"))
        self._with_logprobs = body.get("logprobs") not in (None, False)
        self._with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._prompt_ids, self._out_ids = prompt_ids, out_ids
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"

    def unary(self, kv_transfer_params: Json | None) -> Json:
        prompt_ids = {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids if self._with_ids else None}
        head = self._head("chat.completion" if self._chat else "text_completion")
        choice = {"index": 0, **self._content(self._out_ids), "finish_reason": "length", "stop_reason": None}
        choice |= {"token_ids": self._out_ids if self._with_ids else None, "routed_experts": None}
        if not self._chat:
            choice |= prompt_ids
        tail = {"service_tier": None, "system_fingerprint": FINGERPRINT}
        tail["usage"] = usage(len(self._prompt_ids), len(self._out_ids))
        if self._chat:
            tail |= prompt_ids | {"prompt_text": None}
        ends = {"kv_transfer_params": kv_transfer_params, "ec_transfer_params": None, "metrics": None}
        return {**head, "choices": [choice], **tail, **ends}

    def events(self) -> list[Json]:
        """The data objects of the stream, [DONE] not included."""
        shown = self._prompt_ids if self._with_ids else None
        name = "chat.completion.chunk" if self._chat else "text_completion"
        events = []
        if self._chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            events.append({**self._head(name), "choices": [role], "prompt_token_ids": shown, "prompt_text": None})
        for i, token in enumerate(self._out_ids):
            last = i == len(self._out_ids) - 1
            choice = {"index": 0, **self._content([token], delta=True), "finish_reason": "length" if last else None}
            if last or not self._chat:
                choice["stop_reason"] = None
            if not self._chat:
                choice["prompt_token_ids"] = shown if i == 0 else None
            choice["token_ids"] = [token] if self._with_ids else None
            event = {**self._head(name), "choices": [choice]}
            events.append(event | {"system_fingerprint": FINGERPRINT} if last and not self._with_usage else event)
        if self._with_usage:
            counts = usage(len(self._prompt_ids), len(self._out_ids), streamed=True)
            end = {"choices": [], "usage": counts, "system_fingerprint": FINGERPRINT}
            events.append({**self._head(name), **end})
        return events

    def _head(self, name: str) -> Json:
        return {"id": self._id, "object": name, "created": _CREATED_S, "model": self._model}

    def _content(self, ids: Sequence[int], *, delta: bool = False) -> Json:
        text = decode_ids(ids)
        logprobs = self._logprobs(ids) if self._with_logprobs else None
        if not self._chat:
            return {"text": text, "logprobs": logprobs}
        if delta:
            return {"delta": {"content": text}, "logprobs": logprobs}
        silent = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        return {"message": {"role": "assistant", "content": text, **silent}, "logprobs": logprobs}

    def _logprobs(self, ids: Sequence[int]) -> Json:
        texts = [decode_ids([i]) for i in ids]
        values = [-1 - i / 1000 + self._shift for i in ids]
        named = list(zip(texts, values, strict=True))
        if self._chat:
            tokens = [{"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in named]
            return {"content": [token | {"top_logprobs": [token]} for token in tokens]}
        offsets = list(range(len(ids)))
        top = [{text: value} for text, value in named]
        return {"text_offset": offsets, "token_logprobs": values, "tokens": texts, "top_logprobs": top}

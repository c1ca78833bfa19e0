"""Requests that show whether two tokenizers, and two readings of a chat, are the same."""

from __future__ import annotations

from typing import Any

_TEXT = "Prefill computes the prompt's keys and values once; decode reads them again for every token.\n\n"
_UNICODE = "Größe naïve œuvre — “quotes” 你好，世界 こんにちは привет 🙂👩‍👩‍👧‍👦 e\u0301 \u00a0\u200b ﬁ"
_SPACES = "  two\n\n\n three\t\ttabs \r\n  1234567 3.14159 100,000 it's we'll I'D def f(x):\n        return x**2  "
_MARKS = "<s></s><|im_start|>user<|im_end|><|eot_id|><|endoftext|><bos><pad>[INST] <think>no</think> <tool_call>"
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a <city> & its "surroundings".',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Zürich", "Paris"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_CALL = {
    "id": "call_abc123xy",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'},
}
_SYSTEM = {"role": "system", "content": "You are brief. " + _TEXT}
_USER = {"role": "user", "content": "How is the weather in Zürich?"}
_ANSWER = {"role": "assistant", "content": "It is sunny. " + _TEXT}
_USED = [
    _USER,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_abc123xy", "content": '{"sky": "clear", "celsius": 21.0}'},
]
_CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}

_COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": _TEXT},
    "text without special tokens": {"prompt": _TEXT, "add_special_tokens": False},
    "unicode": {"prompt": _UNICODE},
    "spaces and numbers": {"prompt": _SPACES},
    "special tokens in the text": {"prompt": _MARKS + _TEXT + _MARKS},
    "long text": {"prompt": (_TEXT + _SPACES + _UNICODE) * 20},
    "token ids": {"prompt": [1, 2, 3, 5, 8, 13]},
}
_CHATS: dict[str, dict[str, Any]] = {
    "one message": {"messages": [_USER]},
    "a system prompt": {"messages": [_SYSTEM, _USER]},
    "several turns": {"messages": [_SYSTEM, *[_USER, _ANSWER] * 4, _USER]},
    "tools": {"messages": [_SYSTEM, _USER], "tools": [_TOOL]},
    "tool calls and results": {"messages": _USED, "tools": [_TOOL]},
    "content parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]},
    "unicode": {"messages": [{"role": "user", "content": _UNICODE}]},
    "spaces around": {"messages": [{"role": "user", "content": _SPACES}, _ANSWER, _USER]},
    "special tokens in a message": {"messages": [{"role": "user", "content": _MARKS}]},
    "empty content": {"messages": [{"role": "user", "content": ""}]},
    "an open answer": {"messages": [_USER, {"role": "assistant", "content": "It is"}], **_CONTINUED},
    "no generation prompt": {"messages": [_USER], "add_generation_prompt": False},
    "template variables": {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": False}},
    "special tokens before a chat": {"messages": [_USER], "add_special_tokens": True},
    "reasoning": {"messages": [_USER, {**_ANSWER, "reasoning": "Look outside."}, _USER], "reasoning_effort": "low"},
}


def request_shapes(model: str) -> dict[str, dict[str, Any]]:
    """Name -> the body of a completion or chat request for `model`."""
    named = {**_COMPLETIONS, **{f"chat: {name}": shape for name, shape in _CHATS.items()}}
    return {name: {"model": model, **shape} for name, shape in named.items()}

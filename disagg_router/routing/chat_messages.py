"""A chat body's messages and tools -> what vLLM 0.32 hands to a chat template (its renderers/chat_utils.py).

Only shapes whose result is known to be the same are taken. Key order matters: templates print whole objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from disagg_router.errors import NotUnderstood

Message = dict[str, Any]

_CONTENT_OPTIONAL = ("user", "assistant")
# Clients send back an assistant's whole message; these say nothing when they are empty.
_EMPTY_FIELDS = ("refusal", "audio", "function_call", "annotations", "tool_calls", "reasoning", "reasoning_content")
_FIELDS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls", "reasoning"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
_STRIPPED_LINE = "x-anthropic-billing-header"  # vLLM takes a system line that starts so out of the prompt


def conversation(messages: object, *, parts: bool) -> list[Message]:
    """`parts`: the template loops over content parts, else it wants one text per message.

    Raises NotUnderstood.
    """
    if not isinstance(messages, list) or not messages:
        raise NotUnderstood
    return [_message(message, parts) for message in messages]


def tool_list(tools: object) -> list[dict[str, Any]] | None:
    """The tools as vLLM's model prints them. Raises NotUnderstood."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise NotUnderstood
    return [_tool(tool) for tool in tools]


def _message(message: object, parts: bool) -> Message:
    if not isinstance(message, dict):
        raise NotUnderstood
    given = {key: value for key, value in message.items() if key not in _EMPTY_FIELDS or value not in (None, [])}
    if "reasoning_content" in given:  # the older name of the same field; /chat/completions renames it
        given.setdefault("reasoning", given.pop("reasoning_content"))
    role = given.get("role")
    if not isinstance(role, str) or not given.keys() <= _FIELDS.get(role, set()):
        raise NotUnderstood
    if "content" not in given and role not in _CONTENT_OPTIONAL:
        raise NotUnderstood
    content = given.get("content", [])
    texts = _texts([] if content is None and "tool_calls" in given else content, role)
    made: Message = {"role": role}
    made["content"] = [{"type": "text", "text": text} for text in texts] if parts else "\n".join(filter(None, texts))
    if "tool_calls" in given:
        made["tool_calls"] = _tool_calls(given["tool_calls"])
    if "reasoning" in given:
        made["reasoning"] = made["reasoning_content"] = _text(given["reasoning"])
    if role == "tool":
        made["content"] = "\n".join(texts if parts else filter(None, texts))
        if "tool_call_id" not in given:
            raise NotUnderstood
        made["tool_call_id"] = _text(given["tool_call_id"])
    if "name" in given:
        made["name"] = _text(given["name"])
    return made


def _texts(content: object, role: str) -> list[str]:
    if isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        texts = [_part(part) for part in content]
    else:
        raise NotUnderstood
    if role == "system" and any(text.startswith(_STRIPPED_LINE) for text in texts):
        raise NotUnderstood
    return texts


def _part(part: object) -> str:
    if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
        raise NotUnderstood
    return _text(part["text"])


def _tool_calls(calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise NotUnderstood
    made = []
    for call in calls:
        if not isinstance(call, dict) or call.keys() != {"id", "type", "function"} or call["type"] != "function":
            raise NotUnderstood
        function = call["function"]
        if not isinstance(function, dict) or function.keys() != {"name", "arguments"}:
            raise NotUnderstood
        called = {"arguments": _arguments(_text(function["arguments"])), "name": _text(function["name"])}
        made.append({"id": _text(call["id"]), "function": called, "type": "function"})
    return made


def _arguments(text: str) -> dict[str, Any]:
    """vLLM takes what is no JSON object for an empty one, so that a conversation can go on."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError:
        return {}
    except (ValueError, RecursionError) as exc:
        raise NotUnderstood from exc
    return value if isinstance(value, dict) else {}


def _tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or not {"function"} <= tool.keys() <= {"type", "function"}:
        raise NotUnderstood
    function: object = tool["function"]
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise NotUnderstood
    description, parameters, strict = (function.get(name) for name in ("description", "parameters", "strict"))
    if not function.keys() <= {"name", "description", "parameters", "strict"}:
        raise NotUnderstood
    if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise NotUnderstood
    if not isinstance(strict, bool | None):
        raise NotUnderstood
    shown = {"name": _text(function.get("name")), "description": description, "parameters": parameters}
    return {"type": "function", "function": shown if strict is None else {**shown, "strict": strict}}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise NotUnderstood
    return value

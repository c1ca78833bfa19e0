"""A generation request's body -> what the engine's /tokenize must be asked for the ids of the same prompt."""

from __future__ import annotations

from typing import Any, TypeGuard

from disagg_router.body import value_of
from disagg_router.errors import BadRequest
from disagg_router.model import Body

_COMPLETION_FIELDS = ("model", "add_special_tokens")
_CHAT_FIELDS = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
)


def tokenize_bodies(body: Body) -> tuple[list[int], list[dict[str, Any]]]:
    """(token ids the body gives itself, one /tokenize body for each text).

    Raises BadRequest for a body without a prompt, or with one that is no text and no list of token ids.
    """
    if "messages" in body:
        return [], [_chat(body)]
    if "prompt" not in body:
        raise BadRequest("prompt or messages is missing", param="prompt")
    ids, texts = _split_prompt(value_of(body, "prompt"))
    given = {name: body[name] for name in _COMPLETION_FIELDS if name in body}
    return ids, [{**given, "prompt": text} for text in texts]


def truncated(body: Body, ids: list[int]) -> list[int]:
    """/tokenize knows nothing of `truncate_prompt_tokens`: the last so many are kept, or the first when the side is
    right; a negative value means the context, which is no cut here."""
    keep = value_of(body, "truncate_prompt_tokens")
    if not isinstance(keep, int) or keep <= 0:
        return ids
    return ids[:keep] if value_of(body, "truncation_side") == "right" else ids[-keep:]


def _chat(body: Body) -> dict[str, Any]:
    asked = {name: body[name] for name in _CHAT_FIELDS if name in body}
    # The chat endpoint hands these to the template as variables; /tokenize has no such fields, its kwargs reach the
    # template the same way.
    variables = {name: value for name in ("documents", "reasoning_effort") if (value := value_of(body, name))}
    kwargs = value_of(body, "chat_template_kwargs") or {}
    if variables and isinstance(kwargs, dict):
        if "reasoning_effort" in variables and "enable_thinking" not in kwargs:
            variables["enable_thinking"] = variables["reasoning_effort"] != "none"
        asked["chat_template_kwargs"] = {**kwargs, **variables}
    if (messages := _with_reasoning(value_of(body, "messages"))) is not None:
        asked["messages"] = messages
    return asked


def _with_reasoning(messages: object) -> list[Any] | None:
    """The chat endpoint reads `reasoning_content` as `reasoning`, /tokenize does not. None: nothing to change."""
    if not isinstance(messages, list):
        return None
    changed = [_renamed(message) for message in messages]
    return changed if any(new is not old for new, old in zip(changed, messages, strict=True)) else None


def _renamed(message: Any) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(message, dict) or message.get("reasoning_content") is None:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    given = rest.get("reasoning")
    return {**rest, "reasoning": message["reasoning_content"] if given is None else given}


def _split_prompt(prompt: object) -> tuple[list[int], list[str]]:
    if isinstance(prompt, str):
        return [], [prompt]
    if _is_ids(prompt):
        return prompt, []
    items = prompt if isinstance(prompt, list) else []
    texts = [item for item in items if isinstance(item, str)]
    id_lists = [item for item in items if _is_ids(item)]
    if not items or len(texts) + len(id_lists) < len(items):
        raise BadRequest("prompt must be a text, a list of token ids, or a list of those", param="prompt")
    return [token for ids in id_lists for token in ids], texts


def _is_ids(prompt: object) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and bool(prompt) and all(type(item) is int for item in prompt)

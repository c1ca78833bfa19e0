"""What /tokenize is asked, so that its ids are the engine's own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg_router.engines.tokenize import tokenize_bodies, truncated
from disagg_router.errors import BadRequest

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def raw(body: dict[str, Any]) -> dict[str, msgspec.Raw]:
    return {key: msgspec.Raw(msgspec.json.encode(value)) for key, value in body.items()}


def asked(body: dict[str, Any]) -> tuple[list[int], list[dict[str, Any]]]:
    ids, bodies = tokenize_bodies(raw(body))
    return ids, [msgspec.json.decode(msgspec.json.encode(each)) for each in bodies]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "m", "prompt": "a", "max_tokens": 5}, ([], [{"model": "m", "prompt": "a"}])),
        ({"prompt": "a", "add_special_tokens": False}, ([], [{"prompt": "a", "add_special_tokens": False}])),
        ({"prompt": [5, 6, 7]}, ([5, 6, 7], [])),
        ({"prompt": [[5, 6], [7]]}, ([5, 6, 7], [])),
        ({"prompt": ["a", "b"]}, ([], [{"prompt": "a"}, {"prompt": "b"}])),
        ({"model": "m", "messages": MESSAGES, "temperature": 0}, ([], [{"model": "m", "messages": MESSAGES}])),
    ],
    ids=["text", "without special tokens", "ids", "lists of ids", "texts", "chat"],
)
def test_prompts(body: dict[str, Any], expected: object) -> None:
    """Token ids are counted here, texts and chats by the engine."""
    assert asked(body) == expected


def test_everything_the_template_sees_goes_along() -> None:
    """The chat fields that /tokenize knows too are passed as they are."""
    body = {
        "messages": MESSAGES,
        "tools": [TOOL],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
        "chat_template": "{{ messages }}",
        "chat_template_kwargs": {"a": 1},
        "media_io_kwargs": {},
        "mm_processor_kwargs": {},
    }
    assert asked({**body, "tool_choice": "auto", "stream": True}) == ([], [body])


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({"documents": [{"text": "d"}]}, {"documents": [{"text": "d"}]}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "a": 1}},
            {"reasoning_effort": "low", "enable_thinking": False, "a": 1},
        ),
    ],
    ids=["documents", "reasoning", "no reasoning", "the client's own kwargs"],
)
def test_template_variables_that_tokenize_has_no_field_for(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """The chat endpoint turns them into template variables; here they are made such beforehand."""
    _, (body,) = asked({"messages": MESSAGES, **fields})
    assert body["chat_template_kwargs"] == kwargs


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"reasoning_content": "r"}, {"reasoning": "r"}),
        ({"reasoning_content": "r", "reasoning": "s"}, {"reasoning": "s"}),
        ({"reasoning_content": "r", "reasoning": None}, {"reasoning": "r"}),
        ({"reasoning_content": None}, {"reasoning_content": None}),
    ],
)
def test_reasoning_goes_by_its_newer_name(given: dict[str, Any], sent: dict[str, Any]) -> None:
    """The chat endpoint renames reasoning_content, /tokenize drops it: their prompts would differ (seen on 0.32)."""
    answer = {"role": "assistant", "content": "a"}
    _, (body,) = asked({"messages": [*MESSAGES, {**answer, **given}]})
    assert body["messages"] == [*MESSAGES, {**answer, **sent}]


@pytest.mark.parametrize("prompt", [None, 5, [], [[]], [1, "a"], ["a", [1, "b"]], {"a": 1}])
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    """Neither a text nor token ids."""
    with pytest.raises(BadRequest):
        asked({"prompt": prompt})


def test_a_body_without_prompt_is_refused() -> None:
    """Nothing to count."""
    with pytest.raises(BadRequest, match="missing"):
        asked({"model": "m"})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": 3}, [2, 3, 4]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
        ({"truncate_prompt_tokens": 40}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": -1}, [1, 2, 3, 4]),
    ],
)
def test_truncation_is_applied_to_the_ids(fields: dict[str, Any], expected: list[int]) -> None:
    """/tokenize does not know it; a negative value means the context."""
    assert truncated(raw(fields), [1, 2, 3, 4]) == expected

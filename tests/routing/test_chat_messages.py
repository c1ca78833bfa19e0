"""Messages and tools as vLLM 0.32 hands them to a template; the right values were printed by its own classes."""

from __future__ import annotations

import json

import pytest

from disagg_router.errors import NotUnderstood
from disagg_router.routing.chat_messages import conversation, tool_list

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2.0}'}, "id": "c1"}
CALLED = {"id": "c1", "function": {"arguments": {"b": 1, "a": 2.0}, "name": "f"}, "type": "function"}


@pytest.mark.parametrize(
    ("message", "as_text", "as_parts"),
    [
        ({"role": "user", "content": "hi"}, "hi", [{"type": "text", "text": "hi"}]),
        ({"content": PARTS, "role": "user"}, "a\nb", PARTS),
        ({"role": "user", "content": ""}, "", [{"type": "text", "text": ""}]),
        ({"role": "user"}, "", []),
        ({"role": "tool", "content": PARTS, "tool_call_id": "c1"}, "a\nb", "a\n\nb"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "", []),
    ],
    ids=["text", "parts", "empty", "nothing", "a tool's parts", "a call alone"],
)
def test_content(message, as_text, as_parts):
    """Joined by line ends without the empty ones, or part by part; a tool's is always text."""
    assert conversation([message], parts=False)[0]["content"] == as_text
    assert conversation([message], parts=True)[0]["content"] == as_parts


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_calls": [CALL]}, {"tool_calls": [CALLED]}),
        ({"tool_calls": []}, {}),
        ({"tool_calls": None, "refusal": None, "annotations": [], "audio": None, "function_call": None}, {}),
        ({"reasoning": "r"}, {"reasoning": "r", "reasoning_content": "r"}),
        ({"reasoning_content": "r"}, {"reasoning": "r", "reasoning_content": "r"}),
        ({"name": "bob"}, {"name": "bob"}),
    ],
)
def test_fields_of_an_assistant_message(fields, expected):
    """In the order in which a template would print them, whatever the client's order was."""
    (made,) = conversation([{**fields, "content": "x", "role": "assistant"}], parts=False)
    assert json.dumps(made) == json.dumps({"role": "assistant", "content": "x", **expected})


@pytest.mark.parametrize("arguments", ["", "[1]", '{"a":', "null"])
def test_arguments_that_are_no_object_are_an_empty_one(arguments):
    """So that the conversation can go on."""
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    (made,) = conversation([{"role": "assistant", "content": "", "tool_calls": [call]}], parts=False)
    assert made["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        {"content": "x"},
        {"role": "developer", "content": "x"},
        {"role": "user", "content": None},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": "x", "name": None},
        {"role": "user", "content": "x", "other": 1},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]},
        {"role": "system", "content": "x-anthropic-billing-header: 1\nx"},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0}]},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]},
    ],
)
def test_other_shapes_are_left_to_the_engine(message):
    """It refuses them, or does something with them that is not followed here."""
    with pytest.raises(NotUnderstood):
        conversation([message], parts=False)


@pytest.mark.parametrize(
    ("tool", "shown"),
    [
        ({"name": "g"}, {"name": "g", "description": None, "parameters": None}),
        ({"parameters": {"z": 1}, "name": "g"}, {"name": "g", "description": None, "parameters": {"z": 1}}),
        ({"name": "g", "strict": True}, {"name": "g", "description": None, "parameters": None, "strict": True}),
    ],
)
def test_tools_are_shown_with_all_their_fields(tool, shown):
    """In vLLM's order; strict only where it is given."""
    assert json.dumps(tool_list([{"function": tool}])) == json.dumps([{"type": "function", "function": shown}])


@pytest.mark.parametrize("tools", [[], {}, [{"type": "x"}], [{"function": {"name": "g", "x": 1}}], [{"function": 1}]])
def test_other_tools_are_left_to_the_engine(tools):
    """Also the empty list, which it refuses."""
    with pytest.raises(NotUnderstood):
        tool_list(tools)

"""Chat templates, with transformers itself as the judge of what they give."""

from __future__ import annotations

import random
from datetime import datetime
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from disagg_router.errors import NotUnderstood
from disagg_router.routing.chat_messages import conversation, tool_list
from disagg_router.routing.chat_template import ChatTemplate
from tests.routing.chat_templates import ALL, LLAMA_LIKE, MISTRAL_LIKE, PARTS_LIKE, QWEN_LIKE
from tests.routing.tiny_tokenizers import SPECIAL, byte_level

TOOL = {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"b": 1, "a": [1.5]}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "<é>"}'}}
TEXTS = ["", "hi", "  Zürich\n", "<b>'bold'</b>", "two\n\nlines", "<|im_end|>"]


def random_messages(rng: random.Random) -> list[dict]:
    made: list[dict] = [{"role": "system", "content": rng.choice(TEXTS)}] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(1, 5)):
        made.append({"role": "user", "content": rng.choice(TEXTS)})
        if rng.random() < 0.4:
            made.append({"role": "assistant", "content": None, "tool_calls": [CALL]})
            made.append({"role": "tool", "content": rng.choice(TEXTS), "tool_call_id": "c1"})
        made.append({"role": "assistant", "content": rng.choice(TEXTS), "reasoning": rng.choice(TEXTS)})
    return made[: rng.randrange(1, len(made) + 1)]


@pytest.mark.parametrize("name", ALL)
def test_templates_give_what_transformers_gives(name):
    """Random conversations, tools, open answers and variables; what transformers refuses is not understood here."""
    template, rng = ChatTemplate(ALL[name], SPECIAL), random.Random(name)
    theirs: Any = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=ALL[name], **SPECIAL)
    same = 0
    for _ in range(200):
        messages = conversation(random_messages(rng), parts=template.takes_parts)
        tools = tool_list(rng.choice([None, [TOOL]]))
        variables = rng.choice(
            [
                {"add_generation_prompt": True},
                {"add_generation_prompt": True, "enable_thinking": False, "date_string": "today", "bos_token": "?"},
                {"add_generation_prompt": True, "documents": [{"title": "é"}], "reasoning_effort": "low"},
                {"continue_final_message": True},
                {},
            ]
        )
        try:
            expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False, **variables)
        except Exception:
            with pytest.raises(NotUnderstood):
                template.render(messages, tools, variables)
        else:
            assert template.render(messages, tools, variables) == expected
            same += 1
    assert same > 50


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (LLAMA_LIKE, False),
        (QWEN_LIKE, False),
        (MISTRAL_LIKE, False),
        (PARTS_LIKE, True),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages[1:] %}{% for p in m['content'] | list %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% set rest = messages %}{% for m in rest %}{% for p in m.content %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{{ m.content }}{% endfor %}", False),
        ("{% macro f(content) %}{% for p in content %}{% endfor %}{% endmacro %}{{ f(messages) }}", False),
        ("{% for a, b in messages %}{% for p in a.content %}{% endfor %}{% endfor %}", False),
        ("{% set ns = namespace() %}{% set ns.all = messages %}{% for p in content %}{% endfor %}", False),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_the_content_format_is_the_one_that_vllm_finds(source, parts):
    """Its rules, seen by running it: loops over a message's content make parts; what it cannot follow means text."""
    assert ChatTemplate(source, {}).takes_parts is parts


def test_the_date_is_the_one_given():
    """A template may print it; time is injected."""
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, lambda: datetime(2026, 3, 4))
    assert template.render([{"role": "user", "content": ""}], None, {}) == "04 Mar 2026"


@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "chat_template", "conversation"])
def test_a_variable_that_would_steer_the_renderer_is_not_understood(name):
    """A client could name it in chat_template_kwargs; only the engine knows what it makes of it."""
    with pytest.raises(NotUnderstood):
        ChatTemplate("{{ messages }}", {}).render([{"role": "user", "content": ""}], None, {name: 1})


@pytest.mark.parametrize("source", ["{% for %}", "{{ ''.__class__.mro() }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"])
def test_a_template_that_fails_is_not_understood(source):
    """At its compiling, in the sandbox, or in its own arithmetic."""
    with pytest.raises(NotUnderstood):
        ChatTemplate(source, {}).render([{"role": "user", "content": ""}], None, {})

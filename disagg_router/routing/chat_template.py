"""A model's chat template, rendered as transformers does it (5.x, utils/chat_template_utils.py)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from disagg_router.errors import NotUnderstood
from disagg_router.routing.chat_messages import Message
from disagg_router.routing.content_format import takes_parts

# A client's variable of such a name would steer vLLM and transformers themselves.
_RESERVED = {
    *("self", "messages", "tools", "conversation", "conversations", "chat_template", "tokenizer_kwargs", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
}
_FINAL = "CONTINUE_FINAL_MESSAGE_TAG "


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said; here it is only text, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own type

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Macro) -> str:
        return caller()


class ChatTemplate:
    """`takes_parts`: messages are to have content parts (chat_messages.conversation)."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`special_tokens`: bos_token and so on, as template variables. Raises NotUnderstood for one that does not
        compile."""
        environment = _environment(now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise NotUnderstood("the chat template does not compile") from exc
        self._source, self._special_tokens = source, special_tokens
        self._variables = meta.find_undeclared_variables(tree)
        self.takes_parts = takes_parts(tree)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str:
        """`variables` hold add_generation_prompt and continue_final_message too.

        Raises NotUnderstood where the template refuses or fails: the engine's own answer says it better.
        """
        if _RESERVED & variables.keys():
            raise NotUnderstood
        named = {"documents": None, "add_generation_prompt": False, **variables}
        keeps_open = named.pop("continue_final_message", False)
        if keeps_open:
            if named["add_generation_prompt"] or "content" not in self._source:
                raise NotUnderstood
            messages = _opened(messages)
        shown = self._variables | {"documents", "add_generation_prompt"}
        named = {**self._special_tokens, **{name: value for name, value in named.items() if name in shown}}
        try:
            text = self._template.render(messages=messages, tools=tools, **named)
        except Exception as exc:  # a template is somebody else's program: it may raise anything
            raise NotUnderstood from exc
        return _cut_open(text, messages[-1]["content"]) if keeps_open else text


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Without jinja2's escaping of HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def _opened(messages: Sequence[Message]) -> list[Message]:
    """The last message's text with a mark at its end."""
    last = {**messages[-1], "content": copy.deepcopy(messages[-1]["content"])}
    if isinstance(last["content"], str):
        last["content"] += _FINAL
    elif last["content"]:
        last["content"][-1]["text"] += _FINAL
    else:
        raise NotUnderstood
    return [*messages[:-1], last]


def _cut_open(text: str, content: str | list[dict[str, str]]) -> str:
    """What precedes the mark; spaces before it go where the template trimmed those after it."""
    final = (content if isinstance(content, str) else content[-1]["text"]).removesuffix(_FINAL)
    if final.strip() not in text or _FINAL.strip() not in text:
        raise NotUnderstood
    place = text.rindex(_FINAL.strip())
    return text[:place] if text[place : place + len(_FINAL)] == _FINAL else text[:place].rstrip()

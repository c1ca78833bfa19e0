"""Token ids of a request without a trip to an engine: the model's own tokenizer.json and chat template."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Raw
from tokenizers import Tokenizer

from disagg_router.body import value_of
from disagg_router.errors import BadRequest, NotUnderstood
from disagg_router.model import Body
from disagg_router.routing.chat_messages import conversation, tool_list
from disagg_router.routing.chat_template import ChatTemplate
from disagg_router.routing.text_chunks import TextChunks

# Below this, tokenizing on the spot costs less than a thread; above, the loop must go on meanwhile.
_INLINE_CHARS = 2048
_INLINE_BODY_BYTES = 128 * 1024
_LONGEST_CHARS = 4 * 1024 * 1024  # some seconds; an engine refuses what is too long for its context by its characters

# Where one of these is set, only the engine knows what becomes of the prompt.
_OTHERS = (
    *("chat_template", "media_io_kwargs", "mm_processor_kwargs"),
    *("prompt_embeds", "suffix", "truncate_prompt_tokens"),
)
_EFFORTS = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ids` as the client gave them, or a text still to be tokenized."""

    ids: Sequence[int] = ()
    text: str | None = None
    special_tokens: bool = False  # those that the tokenizer adds around it


@dataclass(frozen=True, slots=True)
class ChunkStats:
    """Characters of texts: tokenized now, and known from before."""

    tokenized_chars: int
    known_chars: int


class LocalTokenizer:
    """Safe to use from one event loop; tokenizing longer texts happens in a thread, without the GIL."""

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, ChatTemplate], chunks: TextChunks) -> None:
        """`templates`: the `default` one, and `tool_use` where the model has one for requests with tools. The
        tokenizer's own padding and truncation are switched off, as the engine does."""
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer, self._templates, self._chunks = tokenizer, templates, chunks
        self._around = _added_around(tokenizer)
        self._bounded, self._normalizes = _bounded_by_bytes(tokenizer), tokenizer.normalizer is not None
        self._tokenized_chars = self._known_chars = 0

    async def prompt(self, body: Body) -> Prompt | None:
        """None where only the engine can tell. A body has `messages` or `prompt`, not both."""
        try:
            if sum(len(memoryview(value)) for value in body.values() if isinstance(value, Raw)) > _INLINE_BODY_BYTES:
                return await asyncio.to_thread(self._prompt, body)
            return self._prompt(body)
        except (NotUnderstood, BadRequest):
            return None

    async def ids(self, prompt: Prompt) -> Sequence[int]:
        if prompt.text is None:
            return prompt.ids
        if prompt.special_tokens and self._around is None:
            return (await self._encoded([prompt.text], special_tokens=True))[0]
        chunks = self._chunks.cut(prompt.text)
        known = [self._chunks.ids(chunk) for chunk in chunks]
        missing = [chunk for chunk, ids in zip(chunks, known, strict=True) if ids is None]
        made = iter(await self._encoded(missing, special_tokens=False))
        before, after = self._around if prompt.special_tokens and self._around else ([], [])
        whole = array("I", before)
        for place, (chunk, ids) in enumerate(zip(chunks, known, strict=True)):
            if ids is not None:
                whole += ids
                continue
            new = next(made)
            whole += new
            if place < len(chunks) - 1:  # the last one is what the conversation's next turn changes
                self._chunks.keep(chunk, new)
        tokenized_chars = sum(map(len, missing))
        self._tokenized_chars += tokenized_chars
        self._known_chars += len(prompt.text) - tokenized_chars
        whole.extend(after)
        return whole

    def at_most_tokens(self, prompt: Prompt) -> int | None:
        """A bound that costs nothing: no token of a byte-level tokenizer stands for less than a byte. None where
        nothing is known."""
        if prompt.text is None:
            return len(prompt.ids)
        if self._around is None or not self._bounded or (self._normalizes and not prompt.text.isascii()):
            return None
        text_bytes = len(prompt.text.encode(errors="surrogatepass"))
        return text_bytes + (sum(map(len, self._around)) if prompt.special_tokens else 0)

    def stats(self) -> ChunkStats:
        return ChunkStats(self._tokenized_chars, self._known_chars)

    # --- what a body asks for -------------------------------------------------------------------------------

    def _prompt(self, body: Body) -> Prompt:
        if any(value_of(body, name) is not None for name in _OTHERS):
            raise NotUnderstood
        chat = "messages" in body
        prompt = self._chat(body) if chat else value_of(body, "prompt")
        if isinstance(prompt, str) and len(prompt) <= _LONGEST_CHARS:
            return Prompt(text=prompt, special_tokens=_flag(body, "add_special_tokens", not chat))
        if isinstance(prompt, list) and set(map(type, prompt)) == {int}:
            return Prompt(ids=prompt)
        raise NotUnderstood

    def _chat(self, body: Body) -> str:
        tools = tool_list(value_of(body, "tools"))
        template = self._templates.get("default")
        if tools is not None:
            template = self._templates.get("tool_use", template)
        if template is None:
            raise NotUnderstood
        messages = conversation(value_of(body, "messages"), parts=template.takes_parts)
        return template.render(messages, tools, _variables(body))

    # --- the tokenizer --------------------------------------------------------------------------------------

    async def _encoded(self, texts: list[str], *, special_tokens: bool) -> list[array[int]]:
        if not texts:
            return []
        if sum(map(len, texts)) <= _INLINE_CHARS:
            return self._encode(texts, special_tokens)
        return await asyncio.to_thread(self._encode, texts, special_tokens)

    def _encode(self, texts: list[str], special_tokens: bool) -> list[array[int]]:
        # Of the ways to encode this one lets go of the GIL.
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens)
        return [array("I", made.ids) for made in encoded]


def _variables(body: Body) -> dict[str, Any]:
    """Template variables of a chat request, merged as vLLM's ChatCompletionRequest does it: its own fields win over
    chat_template_kwargs, and None and "auto" stand for not given."""
    kwargs = value_of(body, "chat_template_kwargs")
    documents, effort = value_of(body, "documents"), value_of(body, "reasoning_effort")
    if not isinstance(kwargs, dict | None) or effort not in _EFFORTS or not _are_documents(documents):
        raise NotUnderstood
    variables = {
        **(kwargs or {}),
        "add_generation_prompt": _flag(body, "add_generation_prompt", True),
        "continue_final_message": _flag(body, "continue_final_message", False),
    }
    if documents is not None:
        variables["documents"] = documents
    if effort is not None:
        variables["reasoning_effort"] = effort
        variables.setdefault("enable_thinking", effort != "none")
    return {name: value for name, value in variables.items() if value not in (None, "auto")}


def _flag(body: Body, name: str, default: bool) -> bool:
    value = value_of(body, name) if name in body else default
    if not isinstance(value, bool):
        raise NotUnderstood
    return value


def _are_documents(documents: object) -> bool:
    if documents is None:
        return True
    return isinstance(documents, list) and all(
        isinstance(document, dict) and all(isinstance(value, str) for value in document.values())
        for document in documents
    )


def _added_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids that the post-processor puts before and after a text; None where it does more than that."""
    probe = "a"
    plain = tokenizer.encode(probe, add_special_tokens=False).ids
    full = tokenizer.encode(probe, add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    return None


def _bounded_by_bytes(tokenizer: Tokenizer) -> bool:
    """Whether every token stands for at least one byte of the text, once that is normalized; NFC leaves ASCII alone."""
    made = json.loads(tokenizer.to_str())
    steps = made["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    kind = (made["normalizer"] or {"type": None})["type"]
    byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    return byte_level and kind in (None, "NFC") and not any(step.get("add_prefix_space") for step in steps)

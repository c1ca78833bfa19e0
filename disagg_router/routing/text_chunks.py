"""Texts cut where tokenizing cannot reach across, and the ids of the chunks seen before.

The tokenizers library takes added tokens out of a text first (longest match, left to right) and tokenizes what lies
between them piece by piece. So the ids of a text are those of its chunks, one after the other, where every chunk but
the first starts with an added token that takes nothing from its left side.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from tokenizers import AddedToken

_CHUNK_CHARS = 256  # at least; smaller ones would cost more to remember than to tokenize


class TextChunks:
    """The least recently used chunks are forgotten first. Bounded by `max_entries` and by `max_bytes`, which counts
    texts and ids; a chunk that would take a quarter of the bytes is not kept."""

    def __init__(
        self, added: Iterable[AddedToken], *, max_entries: int = 16_384, max_bytes: int = 64 * 1024 * 1024
    ) -> None:
        raw = [token for token in added if not token.normalized and token.content]
        self._marks = frozenset(token.content for token in raw if _cuts(token))
        self._added = re.compile(_pattern(token.content for token in raw)) if self._marks else None
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def cut(self, text: str) -> list[str]:
        """One chunk where there is no place to cut. A text that goes on is cut at the same places, and more."""
        if self._added is None or len(text) < 2 * _CHUNK_CHARS:
            return [text]
        chunks, start = [], 0
        for found in self._added.finditer(text):
            if found.start() - start >= _CHUNK_CHARS and found.group() in self._marks:
                chunks.append(text[start : found.start()])
                start = found.start()
        chunks.append(text[start:])
        return chunks

    def ids(self, chunk: str) -> array[int] | None:
        if ids := self._known.get(chunk):
            self._known.move_to_end(chunk)
        return ids

    def keep(self, chunk: str, ids: array[int]) -> None:
        size_bytes = _bytes(chunk, ids)
        if chunk in self._known or size_bytes > self._max_bytes // 4:
            return
        self._known[chunk] = ids
        self.held_bytes += size_bytes
        while len(self._known) > self._max_entries or self.held_bytes > self._max_bytes:
            self.held_bytes -= _bytes(*self._known.popitem(last=False))


def _cuts(token: AddedToken) -> bool:
    """It neither takes spaces from its left, nor asks what stands there; nor does a token to its left care for it."""
    first = token.content[0]
    return not (token.lstrip or token.single_word or first.isspace() or first.isalnum() or first == "_")


def _pattern(contents: Iterable[str]) -> str:
    """Matches the longest of `contents` at each place, in time that does not grow with their number."""
    trie: dict[str, dict[str, object]] = {}
    for content in contents:
        node: dict[str, object] = trie  # type: ignore[assignment]
        for char in content:
            node = node.setdefault(char, {})  # type: ignore[assignment]
        node[""] = {}
    return _branches(trie)


def _branches(node: Mapping[str, object]) -> str:
    """Depth: that of the longest content."""
    ends = [re.escape(char) + _branches(below) for char, below in node.items() if char]  # type: ignore[arg-type]
    if not ends:
        return ""
    whole = ends[0] if len(ends) == 1 and "" not in node else f"(?:{'|'.join(ends)})"
    return f"{whole}?" if "" in node else whole


def _bytes(chunk: str, ids: array[int]) -> int:
    return sys.getsizeof(chunk) + sys.getsizeof(ids)

"""Chunks: together their ids are those of the whole text, whatever it holds."""

from __future__ import annotations

import random
from array import array

import pytest
from tokenizers import AddedToken, Tokenizer

from disagg_router.routing.text_chunks import TextChunks
from tests.routing.tiny_tokenizers import MARKS, byte_level, metaspace

# What could reach across a cut: tokens that take spaces, ask for word ends, overlap others, or are normalized.
AWKWARD = (
    AddedToken("<eat>", lstrip=True, rstrip=True, normalized=False),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("<|im", normalized=False),
    AddedToken("<|im_start|>user", normalized=False),
    AddedToken("ends<|", normalized=False),
    AddedToken("x<|im_end|>", normalized=False),
    AddedToken("é<|eot", normalized=True),
    AddedToken("   ", normalized=False),
)
WORDS = ["the ", " and", "word", "é<|eot_id|>", "\n", "  ", "<|im", "ends", "<", "x", "_", "<eat>", "你好", "values, "]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice([*WORDS, *MARKS]) * rng.choice([1, 1, 1, 30]) for _ in range(rng.randrange(40)))


def chunk_ids(tokenizer: Tokenizer, chunks: list[str]) -> list[int]:
    return [token for chunk in chunks for token in tokenizer.encode(chunk, add_special_tokens=False).ids]


@pytest.mark.parametrize("build", [byte_level, metaspace])
@pytest.mark.parametrize("awkward", [(), AWKWARD], ids=["marks only", "awkward tokens"])
def test_chunks_give_the_ids_of_the_whole_text(build, awkward):
    """The claim that everything here rests on, with the library itself as the judge."""
    tokenizer, rng = build(*awkward), random.Random(0)
    chunks = TextChunks(tokenizer.get_added_tokens_decoder().values())
    cuts = 0
    for _ in range(150):
        text = random_text(rng)
        cut = chunks.cut(text)
        assert "".join(cut) == text
        assert chunk_ids(tokenizer, cut) == tokenizer.encode(text, add_special_tokens=False).ids, text
        cuts += len(cut) - 1
    assert cuts > 150


def test_a_text_that_goes_on_is_cut_at_the_same_places():
    """So a conversation's earlier turns are found again."""
    chunks = TextChunks(byte_level().get_added_tokens_decoder().values())
    turns = [f"<|im_start|>user\n{i} {'the prompt ' * 40}<|im_end|>\n" for i in range(6)]
    for turn in range(1, 6):
        shorter, longer = (chunks.cut("".join(turns[:count])) for count in (turn, turn + 1))
        assert longer[: len(shorter) - 1] == shorter[:-1]


@pytest.mark.parametrize("added", [(), (AddedToken("<eat>", lstrip=True, normalized=False), AddedToken("end"))])
def test_without_a_place_to_cut_the_text_stays_whole(added):
    """Tokens that take spaces from their left, and normalized ones, are none."""
    assert TextChunks(added).cut("<eat> end " * 200) == ["<eat> end " * 200]


def test_the_least_recently_used_chunk_goes_first():
    """At the entry bound."""
    chunks = TextChunks([], max_entries=2)
    for text in ("one", "two"):
        chunks.keep(text, array("I", [1, 2]))
    assert list(chunks.ids("one") or ()) == [1, 2]
    chunks.keep("three", array("I", [3]))
    assert [chunks.ids(text) is not None for text in ("one", "two", "three")] == [True, False, True]


def test_bytes_are_bounded():
    """And what goes gives its bytes back; a chunk too large for the bound is not kept at all."""
    chunks = TextChunks([], max_bytes=10_000)
    chunks.keep("x" * 9_000, array("I", [1]))
    assert len(chunks) == 0
    for i in range(100):
        chunks.keep(f"{i}" * 500, array("I", [i] * 100))
    assert 0 < chunks.held_bytes <= 10_000
    assert 3 <= len(chunks) <= 9

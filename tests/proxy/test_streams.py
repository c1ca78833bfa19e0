"""The few things the relay looks at in a stream, whatever way it is cut into pieces."""

from __future__ import annotations

import pytest

from disagg_router.proxy.streams import ErrorWatch, FirstContent, tokens_said

GOOD = (
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    b'data: {"choices": [{"delta": {"content": "say data: {\\"error\\" twice"}}]}\n\n'
    b"data: [DONE]\n\n"
)
ERROR = b'data: {"error": {"message": "EngineCore encountered an issue.", "code": 500}}\n\n'


def pieces(stream: bytes, size: int) -> list[bytes]:
    return [stream[start : start + size] for start in range(0, len(stream), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 13, 16, 40, 1000])
def test_an_error_event_is_the_last_thing_that_goes_out(size):
    """Neither the [DONE] behind it nor anything else; and everything before it, byte for byte."""
    before = GOOD.replace(b"data: [DONE]\n\n", b"")
    watch, sent = ErrorWatch(), b""
    for piece in pieces(before + ERROR + b"data: [DONE]\n\n", size):
        if not watch.ended:
            sent += watch.feed(piece)
    assert (sent, watch.ended) == (before + ERROR, True)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 13, 16, 40, 1000])
def test_a_good_stream_passes_byte_for_byte(size):
    """Also one whose content speaks of errors: quotes in it are escaped."""
    watch = ErrorWatch()
    assert b"".join(watch.feed(piece) for piece in pieces(GOOD, size)) == GOOD
    assert not watch.ended


@pytest.mark.parametrize("size", [1, 5, 80, 1000])
def test_c39_the_role_alone_is_no_content(size):
    """TTFT ends with the first event that says something."""
    first, seen = FirstContent(), b""
    for piece in pieces(GOOD, size):
        seen += piece
        if first.feed(piece):
            break
    assert first.done
    assert b"twice" in seen


@pytest.mark.parametrize(
    ("event", "content"),
    [
        (b'data: {"choices": [{"text": "a"}]}', True),
        (b'data: {"choices": [{"text": ""}]}', False),
        (b'data: {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}', True),
        (b'data: {"choices": [], "usage": {"prompt_tokens": 3}}', False),
        (b": a comment", False),
        (b"data: [DONE]", False),
        (b"data: {broken", False),
    ],
)
def test_what_counts_as_content(event, content):
    """Text, or anything in a delta beside its role."""
    assert FirstContent().feed(event + b"\n\n") is content


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "total_tokens": 105, "completion_tokens": 96}}\n\n'
CONTENT = b'data: {"choices": [{"text": "ab"}], "usage": null}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("end", "tokens"),
    [
        (CONTENT + USAGE + DONE, 96),
        (b'ext": "cut"}]}\n\n' + USAGE + DONE, 96),
        (USAGE, 96),
        (USAGE.replace(b"[]", b'[{"text": "x"}]') + DONE, 96),  # with every event
        (CONTENT + DONE, None),
        (CONTENT.replace(b', "usage": null', b"") + DONE, None),
        (b'data: {"choices": [{"text": "\\"usage\\": 7"}]}\n\n' + DONE, None),
        (USAGE[20:] + DONE, None),
        (b"", None),
    ],
)
def test_the_engines_own_count_at_the_end(end, tokens):
    """Where it says one; what is cut or absent says nothing."""
    assert tokens_said(end) == tokens

"""What the router makes of a client's request."""

from __future__ import annotations

import pytest

from disagg_router.model import Slo
from disagg_router.proxy.openai import parse_call


@pytest.mark.parametrize(("digits", "limit"), [(3, 100), (11, None), (400, None)])
def test_a_limit_beyond_all_answers_is_none(digits, limit):
    """The engine says what it thinks of it; the router does not fall over it."""
    content = b'{"model": "tiny", "prompt": "hello", "max_tokens": 1%b}' % (b"0" * (digits - 1))
    call = parse_call(
        "/v1/completions",
        {},
        content,
        "id",
        served_name="tiny",
        adapters=tuple,
        slo=Slo(1.0, 1.0, 1.0),
        allow_path_override=False,
    )
    assert call.request.max_output_tokens == limit

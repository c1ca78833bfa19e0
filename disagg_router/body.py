"""The fields of a client's body, decoded one at a time."""

from __future__ import annotations

from typing import Any

import msgspec

from disagg_router.errors import BadRequest
from disagg_router.model import Body


def value_of(body: Body, key: str) -> Any:  # noqa: ANN401 - JSON
    """The decoded value of a field; None when absent.

    Raises BadRequest: a value that is no JSON passes where a body is only split into its fields.
    """
    value = body.get(key)
    if not isinstance(value, msgspec.Raw):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise BadRequest(f"{key} is not valid JSON", param=key) from exc

"""What the connectors share: how a request becomes a prefill leg."""

from __future__ import annotations

from disagg_router.model import Body

# The prefill leg computes the prompt and one token that nobody reads, so everything about its output goes: a grammar
# or a minimum length cannot be met by one token, and the engine would refuse or answer at length.
_OUTPUT_FIELDS = (
    "stream_options",
    "min_tokens",
    "best_of",
    "logprobs",
    "top_logprobs",
    "response_format",
    "structured_outputs",
    "stop",
    "stop_token_ids",
)


def one_token_body(body: Body) -> dict[str, object]:
    """`body` asking for one unstreamed token of the same prompt."""
    leg = {key: value for key, value in body.items() if key not in _OUTPUT_FIELDS}
    leg.update(stream=False, max_tokens=1, n=1)
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg

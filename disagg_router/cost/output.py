"""How long answers turn out to be, by what their requests allow."""

from __future__ import annotations

import math
from dataclasses import dataclass

UNKNOWN_TOKENS = 256.0  # of an answer of which nothing is known
BUCKETS = 21  # powers of two up to 2**20; whatever is above shares the last
MEMORY = 50  # answers after which an old one counts for a third
FAR = 4.0  # times the expected length: what goes beyond is cut off


@dataclass(slots=True)
class _Mean:
    tokens: float
    seen: int = 0


class OutputHistory:
    """A decaying mean per power of two of max_tokens, and one for requests without.

    It is min(max_tokens, 256) at first and the geometric middle between that and the first answer after one. A mean,
    not a median, since it stands for the work to come; one very long answer counts as FAR times what was expected, so
    several are needed to move it.
    """

    def __init__(self) -> None:
        self._means: dict[int | None, _Mean] = {}

    def expect(self, max_output_tokens: int | None) -> float:
        mean = self._means.get(_bucket(max_output_tokens))
        tokens = UNKNOWN_TOKENS if mean is None else mean.tokens
        return tokens if max_output_tokens is None else min(tokens, float(max(1, max_output_tokens)))

    def observe(self, max_output_tokens: int | None, output_tokens: int) -> None:
        mean = self._means.setdefault(_bucket(max_output_tokens), _Mean(self.expect(max_output_tokens)))
        mean.seen += 1
        tokens = min(max(1.0, output_tokens), FAR * mean.tokens)
        if mean.seen == 1:
            mean.tokens = math.sqrt(mean.tokens * tokens)
        else:
            mean.tokens += (tokens - mean.tokens) / min(mean.seen, MEMORY)


def _bucket(max_output_tokens: int | None) -> int | None:
    """The exponent of the next power of two."""
    return None if max_output_tokens is None else min(BUCKETS - 1, max(0, max_output_tokens - 1).bit_length())

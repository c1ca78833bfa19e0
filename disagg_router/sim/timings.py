"""How long a simulated engine's steps take: between the rows of measured tables, or by published coefficients.

Never by the policy's own formula with the policy's own coefficients: what it believes has to be able to be wrong.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

Three = tuple[float, float, float]
Point = tuple[float, float]


class PrefillRow(NamedTuple):
    """One step of `prompts` equal ones: `new_tokens` of each are computed after `cached_tokens` of it."""

    prompts: int
    new_tokens: int
    cached_tokens: int
    step_s: float


class DecodeRow(NamedTuple):
    """One step of `streams`, each with `context_tokens`."""

    streams: int
    context_tokens: int
    step_s: float


class MixedRow(NamedTuple):
    """One step of `chunk_tokens` beside `streams`, each with `context_tokens`. The chunk is cut from prompts of
    `prompt_tokens`, from anywhere in them: what it attends to is the average over a whole prompt."""

    chunk_tokens: int
    prompt_tokens: int
    streams: int
    context_tokens: int
    step_s: float


@dataclass(frozen=True, slots=True)
class StepTables:
    """Without host time. `prefill` has rows of one and of two prompts at the same totals, which tell attention from the
    rest, and rows with cached tokens; `mixed` may be empty."""

    prefill: Sequence[PrefillRow]
    decode: Sequence[DecodeRow]
    mixed: Sequence[MixedRow] = ()


class Line:
    """Straight between its points, and beyond the outermost as between the two next to it."""

    __slots__ = ("_inner", "_slopes", "_xs", "_ys")

    def __init__(self, points: Iterable[Point]) -> None:
        """At least two, in order of x."""
        pairs = list(points)
        self._xs = [float(x) for x, _ in pairs]
        self._ys = [float(y) for _, y in pairs]
        self._slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(pairs)]
        self._inner = self._xs[1:-1]

    def at(self, x: float) -> float:
        i = bisect_right(self._inner, x)
        return self._ys[i] + self._slopes[i] * (x - self._xs[i])


class TableTimings:
    """Between and beyond the rows of `StepTables`.

    A step's time is what its streams take alone, plus what the chunks' tokens add to a step of that many tokens
    (matrices read once whatever their number, then work per token), plus the attention of each chunk. So a chunk of
    nothing costs nothing, no stream leaves a prefill, and each prompt attends only to itself.

    Rows are raised where that makes the time grow with streams and with tokens: kernels are measured with noise.
    """

    def __init__(self, tables: StepTables, host_s: float = 0.0) -> None:
        self._host_s = host_s
        self._decode = _decode_lines(tables.decode)
        self._own, self._cached = _own_attention(tables.prefill), _cached_attention(tables.prefill)
        self._cached_lengths = list(self._cached)
        self._rows: dict[int, Line] = {}  # by streams, over their contexts' sum; made when first asked for
        points = _token_points(tables.prefill, self._decode, self._own)
        self._tokens = Line(_rising(points))
        self._tokens = Line(_rising({**self._beside(tables.mixed, points), **points}))

    def step_s(self, chunks: Sequence[tuple[int, int]], running: int, context_tokens: float) -> float:
        tokens = self._tokens
        if running:
            row = self._rows.get(running)
            if row is None:
                row = self._rows[running] = self._row(running)
            step_s = self._host_s + row.at(context_tokens)
        else:
            step_s = self._host_s + tokens.at(0)
        if chunks:
            total = running
            for new, before in chunks:
                total += new
                step_s += self._attention_s(new, before)
            step_s += tokens.at(total) - tokens.at(running)
        return step_s

    def _attention_s(self, new: int, before: int) -> float:
        """Of one chunk: to itself, and to the tokens before it."""
        per_token_s = self._own.at(new)
        if before:
            lengths = self._cached_lengths
            i = bisect_right(lengths, new)
            if i == 0 or i == len(lengths):
                per_token_s += self._cached[lengths[min(i, len(lengths) - 1)]].at(before)
            else:
                low, high = lengths[i - 1], lengths[i]
                low_s, high_s = self._cached[low].at(before), self._cached[high].at(before)
                per_token_s += low_s + (high_s - low_s) * (new - low) / (high - low)
        return new * per_token_s

    def _row(self, streams: int) -> Line:
        """A decode step of that many streams, over the sum of their contexts."""
        batches = list(self._decode)
        last = batches[-1]
        if streams > last:
            # Beyond the table a further stream is one more token for the matrices; attention reads the contexts' sum.
            further_s = self._tokens.at(streams) - self._tokens.at(last)
            return Line((last * each, time_s + further_s) for each, time_s in self._decode[last].items())
        high = next(batch for batch in batches if batch >= streams)
        low = max((batch for batch in batches if batch <= streams), default=high)
        share = (streams - low) / (high - low) if high > low else 0.0
        low_s, high_s = self._decode[low], self._decode[high]
        return Line((streams * each, low_s[each] + (high_s[each] - low_s[each]) * share) for each in low_s)

    def _beside(self, mixed: Sequence[MixedRow], points: Mapping[int, float]) -> dict[int, float]:
        """What the mixed rows say of steps with token totals that no prefill row has."""
        found: dict[int, list[float]] = {}
        for row in mixed:
            total = row.chunk_tokens + row.streams
            if row.streams and total not in points:
                alone_s = self._row(row.streams).at(row.streams * row.context_tokens)
                attention_s = row.chunk_tokens * self._own.at(row.prompt_tokens)
                rest_s = row.step_s - alone_s - attention_s + self._tokens.at(row.streams)
                found.setdefault(total, []).append(rest_s)
        return {total: sum(times) / len(times) for total, times in found.items()}


def _rising(points: Mapping[int, float]) -> list[Point]:
    found: list[Point] = []
    for x in sorted(points):
        found.append((x, max(points[x], found[-1][1]) if found else points[x]))
    return found


def _decode_lines(rows: Sequence[DecodeRow]) -> dict[int, dict[int, float]]:
    """Step times by streams and by context of each, 0 included, on one grid: what no row has is extrapolated."""
    measured: dict[int, dict[int, float]] = {}
    for row in rows:
        measured.setdefault(row.streams, {})[row.context_tokens] = row.step_s
    contexts = sorted({0, *(row.context_tokens for row in rows)})
    found: dict[int, dict[int, float]] = {}
    below = dict.fromkeys(contexts, 0.0)
    for streams in sorted(measured):
        line, so_far = Line(_rising(measured[streams])), 0.0
        filled: dict[int, float] = {}
        for each in contexts:
            so_far = filled[each] = max(so_far, line.at(each), below[each])
        found[streams] = below = filled
    return found


def _own_attention(rows: Sequence[PrefillRow]) -> Line:
    """Seconds per token that a prompt of that many tokens attends to itself.

    One prompt of n tokens and two of n/2 differ by attention only. What of it is linear in n no row tells from the
    rest: the shortest prompt's attention is taken for quadratic.
    """
    one = {row.new_tokens: row.step_s for row in rows if row.prompts == 1 and not row.cached_tokens}
    two = {row.new_tokens: row.step_s for row in rows if row.prompts == 2 and not row.cached_tokens}
    rates: dict[int, float] = {0: 0.0}
    for half in sorted(two):
        if 2 * half in one:
            more_s = max(0.0, one[2 * half] - two[half])
            rate = rates.get(half)
            if rate is None:
                rate = rates[half] = more_s / (2 * half)
            rates[2 * half] = max(rate, more_s / (2 * half) + rate)
    return Line(_rising(rates))


def _cached_attention(rows: Sequence[PrefillRow]) -> dict[int, Line]:
    """By new tokens: seconds per new token over the cached tokens before them."""
    cold = {row.new_tokens: row.step_s for row in rows if row.prompts == 1 and not row.cached_tokens}
    rates: dict[int, dict[int, float]] = {}
    for row in rows:
        if row.prompts == 1 and row.cached_tokens and row.new_tokens in cold:
            more_s = row.step_s - cold[row.new_tokens]
            rates.setdefault(row.new_tokens, {0: 0.0})[row.cached_tokens] = more_s / row.new_tokens
    return {new: Line(_rising(rates[new])) for new in sorted(rates)}


def _token_points(rows: Sequence[PrefillRow], decode: Mapping[int, Mapping[int, float]], own: Line) -> dict[int, float]:
    """Of a step without any attention, by its tokens. Below the shortest prompt's: decode steps with no context."""
    cold = {row.new_tokens: row for row in rows if row.prompts == 1 and not row.cached_tokens}
    found = {streams: times_s[0] for streams, times_s in decode.items() if streams < min(cold)}
    found[0] = found[min(found)] if found else cold[min(cold)].step_s
    return found | {new: row.step_s - new * own.at(new) for new, row in cold.items()}


@dataclass(frozen=True, slots=True)
class LinearTimings:
    """DistServe's form. A prefill takes a + b*n + c*n*(n/2 + cached), a decode step d + e*streams + f*context, with
    another three from `large_from` streams on: its authors fitted two sets. Chunks beside streams, which DistServe has
    not: the larger of the two constants and the sum of the rest (modelling: mixed step).
    """

    prefill: Three
    step: Three
    large_step: Three | None = None
    large_from: int = 0
    host_s: float = 0.0

    def step_s(self, chunks: Sequence[tuple[int, int]], running: int, context_tokens: float) -> float:
        base_s, rest_s = 0.0, self.host_s
        if running:
            large = self.large_step is not None and running >= self.large_from
            base_s, e_s, f_s = self.large_step if large and self.large_step is not None else self.step
            rest_s += e_s * running + f_s * context_tokens
        if chunks:
            a_s, b_s, c_s = self.prefill
            base_s = max(base_s, a_s)
            for new, before in chunks:
                rest_s += new * (b_s + c_s * (new / 2 + before))
        return base_s + rest_s

"""What a request does to the streams that run where it lands, and what is in store for it there: expected objectives
lost and kept. Probabilities are smooth, since hard gates make a policy flap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from disagg_router.model import InferenceRequest
from disagg_router.policies.forecast import DecodeTerms, PrefillTerms
from disagg_router.view import SLACK_EDGES_S, StreamLoad

# A slack bin stands for its middle; the open ones for a little beyond their edge.
_BIN_SLACK_S = (
    -SLACK_EDGES_S[1],
    *((low + high) / 2 for low, high in itertools.pairwise(SLACK_EDGES_S)),
    2 * SLACK_EDGES_S[-1],
)
PAUSE_PRICE = 0.01  # per stream, for a pause as long as its objective allows
_WIDTH = 0.05  # of an objective: over so much of it a chance goes from three quarters to one quarter, about
_SLACK_WIDTH = 0.1  # of a stream's whole TPOT budget: its length is a guess


def logistic(x: float) -> float:
    return 0.5 + 0.5 * math.tanh(0.5 * x)  # the same function, and this form never overflows


def chance_below(limit_s: float, mean_s: float, sd_s: float) -> float:
    """That a time of that mean and standard deviation is below the limit."""
    width_s = math.hypot(_WIDTH * limit_s, 0.55 * sd_s)  # a logistic of scale 0.55 sd is close to a normal
    return logistic((limit_s - mean_s) / width_s)


def later_tokens_chance(request: InferenceRequest, decode: DecodeTerms) -> float:
    """That the tokens after it do, where they would be decoded."""
    slo, load = request.slo, decode.target.load
    # Prefills take their share of the target's time from every stream there, and their steps are pauses.
    step_s, beside_sd_s = load.token_s(decode.step_s, request.output_tokens)
    chance = chance_below(slo.tpot_s, step_s, math.hypot(decode.sd_s, beside_sd_s))
    if load.stalls_per_s:
        chance *= math.exp(-load.stalls_per_s * max(1.0, request.output_tokens) * step_s)
    return chance * chance_below(slo.max_gap_s, decode.step_s, decode.sd_s)


def start_chance(request: InferenceRequest, decode: DecodeTerms) -> float:
    """That a handed-off stream which starts in the middle of a prefill there gets over the rest of it: the next steps
    are as long as the one that makes its first token."""
    if decode.first_step_s <= decode.step_s:
        return 1.0
    return chance_below(request.slo.max_gap_s, decode.first_step_s, 0.0)


def lost_to_prefill(request: InferenceRequest, prefill: PrefillTerms) -> float:
    """Streams expected to lose an objective because this prompt is computed among them."""
    streams = prefill.target.load.streams
    if not streams.running:
        return 0.0
    times, running = prefill.times, float(streams.running)
    lost = 0.0
    if streams.unbroken:
        pause_sd_s = times.pause_s * times.sd_s / times.whole_s
        lost = streams.unbroken * (1.0 - chance_below(streams.gap_s, times.pause_s, pause_sd_s))
        if lost > running - 0.01:
            return running
    lost += _lost_slack(request, streams, times.stall_s)
    return lost if lost < running else running


def pause_price(prefill: PrefillTerms) -> float:
    """Even where no objective is lost, a shorter pause is better: by the square of the part of the objective it takes,
    so that the steps of short prompts cost next to nothing."""
    streams = prefill.target.load.streams
    return PAUSE_PRICE * streams.unbroken * min(1.0, prefill.times.pause_s / streams.gap_s) ** 2


def lost_to_decode(request: InferenceRequest, decode: DecodeTerms) -> float:
    """Streams expected to lose their TPOT objective because one more is decoded among them."""
    streams = decode.target.load.streams
    if not streams.running:
        return 0.0
    together_tokens = min(streams.to_come_tokens, request.output_tokens)
    return _lost_slack(request, streams, decode.more_s * together_tokens)


def _lost_slack(request: InferenceRequest, streams: StreamLoad, delay_s: float) -> float:
    if delay_s <= 0:
        return 0.0
    tokens = max(16.0, streams.to_come_tokens * 2)  # a stream is half way, on average
    return _shifted(streams.slack, delay_s, _SLACK_WIDTH * request.slo.tpot_s * tokens + 0.005)


def _shifted(counts: Sequence[int], delay_s: float, width_s: float) -> float:
    """How much less likely it gets that each stream ends in time when all end `delay_s` later."""
    lost, twice_s = 0.0, 2.0 * width_s
    for slack_s, count in zip(_BIN_SLACK_S, counts, strict=True):
        if count:
            lost += count * (math.tanh(slack_s / twice_s) - math.tanh((slack_s - delay_s) / twice_s))
    return 0.5 * lost

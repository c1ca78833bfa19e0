"""The default: of all ways to serve a request the one with the most expected requests that meet their objectives, this
one's and those of the streams that it would disturb."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field, validate_call

from disagg_router.errors import NoDecodeInstance
from disagg_router.model import Decision, InferenceRequest, Path, Reason, Role, Target
from disagg_router.policies.candidates import least_loaded
from disagg_router.policies.forecast import (
    PrefillTerms,
    Way,
    decode_terms,
    local_way,
    prefill_terms,
    remote_way,
)
from disagg_router.policies.harm import (
    chance_below,
    later_tokens_chance,
    lost_to_decode,
    lost_to_prefill,
    pause_price,
    start_chance,
)
from disagg_router.view import ClusterView, TargetView, cached_elsewhere_tokens

FEW = 8  # so many decode targets are all costed, with so many prefills for each; of more than these
DECODES = 5  # the candidates are pruned to so many before they are costed,
PREFILLS_EACH = 2  # and to so many prefills for each of them
TTFT_PRICE = 0.05  # per TTFT objective used up: between ways that all meet it the earlier first token wins
HANDOFF_PRICE = 0.02  # what a handoff costs besides time: KV pinned on two sides, and more that can fail
ROLE_PRICE = 0.05  # for using an instance against its configured role
MOST_SAMPLED = 0.01  # of requests; design.md section 7
SAMPLE_LOSS = 0.1  # and only where it is predicted to cost less than this part of the TTFT objective
UNKNOWN_SD = 0.5  # relative deviation of a prediction from which on it counts as not known
COMPUTE_BLOCK_TOKENS = 16  # the smallest piece of a prompt that another target can be said to hold


class _Scored(NamedTuple):
    score: float
    chance: float
    lost: float
    way: Way


@dataclass(frozen=True, slots=True)
class _Best:
    """The best way of each path; `here` is local."""

    here: _Scored
    there: _Scored | None


class BreakEven:
    """Score of a way: chance(TTFT, TPOT and gap ok) - streams expected to lose theirs - small prices.

    With soft roles every target may do either part and a configured role is a preference; otherwise it is binding.
    `sampled`: at most this share of requests tries the other path when nothing is known of it.
    """

    needs_token_count = True
    soft_roles = True

    @validate_call(config=ConfigDict(strict=True))
    def __init__(self, sampled: Annotated[float, Field(ge=0, le=MOST_SAMPLED)] = MOST_SAMPLED) -> None:
        self._sampled = sampled

    def decide(self, request: InferenceRequest, view: ClusterView) -> Decision:
        decodes: Sequence[TargetView] = view.targets
        if request.excluded:
            decodes = [t for t in decodes if t.target not in request.excluded]
        if not view.soft_roles:
            decodes = [t for t in decodes if t.role.decodes]
        if not decodes:
            raise NoDecodeInstance("no instance that may decode is ready", retry_after_s=1)
        if request.prompt_tokens is None:
            return _uncounted(request, decodes)
        found = _search(request, view, decodes)
        here, there = found.here, found.there
        if there is None:
            return _decision(request, found, here, _why_alone(request))
        if there.score > here.score:
            if self._is_sampled(request, there, here):
                return _decision(request, found, here, Reason.SAMPLED)
            return _decision(request, found, there, _why_there(here, there))
        if self._is_sampled(request, here, there):
            return _decision(request, found, there, Reason.SAMPLED)
        return _decision(request, found, here, _why_here(request, here, there))

    def _is_sampled(self, request: InferenceRequest, chosen: _Scored, other: _Scored) -> bool:
        """Whether the path that was not chosen is tried, since nothing is known of it and little is lost by it."""
        if request.tiebreak >= self._sampled or other.way.sd_s < UNKNOWN_SD * (other.way.mean_s - request.waited_s):
            return False
        later_s = other.way.mean_s - chosen.way.mean_s
        return later_s < SAMPLE_LOSS * request.slo.ttft_s and other.lost - chosen.lost < SAMPLE_LOSS


# --- the search ---------------------------------------------------------------------------------------------------


def _search(request: InferenceRequest, view: ClusterView, decodes: Sequence[TargetView]) -> _Best:
    waits_s, each = _quick_waits(request, view), FEW if len(decodes) <= FEW else PREFILLS_EACH
    costed: dict[Target, tuple[PrefillTerms, float, float]] = {}

    def prefill_of(target: TargetView) -> tuple[PrefillTerms, float, float]:
        known = costed.get(target.target)
        if known is None:
            terms = prefill_terms(request, view, target)
            known = costed[target.target] = terms, lost_to_prefill(request, terms), pause_price(terms)
        return known

    here: list[_Scored] = []
    there: list[_Scored] = []
    for target in _pruned_decodes(request, view, decodes):
        decode = decode_terms(request, view, target)
        lost = lost_to_decode(request, decode)
        # What the decode side gives to every way through it: its later tokens' chance, and the prices.
        later = later_tokens_chance(request, decode)
        price = _opening_price(view, target) + (ROLE_PRICE if target.role is Role.PREFILL else 0.0)
        prefill, lost_here, more = prefill_of(target)
        here.append(_score(request, local_way(request, prefill, decode), later, lost + lost_here, price + more))
        if request.splittable:
            later *= start_chance(request, decode)
            places = view.partners.get(target.target.instance, ())
            for place in sorted(places, key=waits_s.__getitem__)[:each]:
                if waits_s[place] == math.inf:
                    break
                source = view.targets[place]
                prefill, lost_there, more = prefill_of(source)
                more += HANDOFF_PRICE + (ROLE_PRICE if source.role is Role.DECODE else 0.0)
                way = remote_way(request, view, prefill, decode)
                there.append(_score(request, way, later, lost + lost_there, price + more))
    return _Best(_first(here, request), _first(there, request) if there else None)


def _score(request: InferenceRequest, way: Way, later: float, lost: float, price: float) -> _Scored:
    slo_s, mean_s = request.slo.ttft_s, way.mean_s
    chance = later * chance_below(slo_s, mean_s, way.sd_s)
    used = mean_s / slo_s
    # Beyond twice the objective it hardly costs more, but the earlier is still the better of two that are lost.
    price += TTFT_PRICE * (used if used < 2.0 else 3.0 - 2.0 / used)
    return _Scored(chance - lost - price, chance, lost, way)


def _opening_price(view: ClusterView, target: TargetView) -> float:
    """Decode is packed when spreading it over more targets would put every stream in some prefill's way."""
    load = target.load
    if not view.leans.pack or load.streams.running or load.decodes or view.leans.lean.get(target.target, 0.0) > 0:
        return 0.0
    return view.leans.pack


def _quick_waits(request: InferenceRequest, view: ClusterView) -> list[float]:
    """How soon each target would be done with this prompt, roughly: which of the many are worth a closer look. Where
    its steps would break pauses, every stream counts as much as the whole TTFT objective, and so does a lack of room;
    infinite: it may not prefill."""
    cached, costs, now_s = request.cached_tokens, view.costs, view.now_s
    each, default, prompt_tokens = costs.targets, costs.target, request.prompt_tokens or 0
    hard, excluded, prompt_bytes = not view.soft_roles, request.excluded, prompt_tokens * costs.kv_bytes_per_token
    waits_s = []
    for t in view.targets:
        load, timing = t.load, each.get(t.target, default)
        tokens = prompt_tokens - cached.get(t.target, 0)
        b_s, streams = timing.prefill_b_s, load.streams
        wait_s = b_s * tokens
        if load.prefills_end_s > now_s:
            wait_s += load.prefills_end_s - now_s
        if streams.unbroken and b_s * (tokens if tokens < timing.chunk_tokens else timing.chunk_tokens) > streams.gap_s:
            wait_s += streams.unbroken * request.slo.ttft_s
        if load.kv_free_bytes < prompt_bytes:
            wait_s += request.slo.ttft_s
        if (hard and t.role is Role.DECODE) or (excluded and t.target in excluded):
            wait_s = math.inf
        waits_s.append(wait_s)
    return waits_s


def _pruned_decodes(
    request: InferenceRequest, view: ClusterView, decodes: Sequence[TargetView]
) -> Sequence[TargetView]:
    """Those that hold most of the prompt, those in use that still have room (packing), and those with least to do."""
    need_bytes = ((request.prompt_tokens or 0) + request.output_tokens) * view.costs.kv_bytes_per_token
    if len(decodes) <= FEW:
        return [t for t in decodes if t.load.kv_free_bytes >= need_bytes] or decodes
    cached = request.cached_tokens
    by_work: list[tuple[int, int]] = []
    holding: list[tuple[int, int]] = []
    for place, t in enumerate(decodes):
        load = t.load
        if load.kv_free_bytes >= need_bytes:
            by_work.append((load.prefills + load.decodes, place))
            if cached and t.target in cached:
                holding.append((-cached[t.target], place))
    by_work.sort()
    in_use = itertools.islice((place for _, place in by_work if decodes[place].load.streams.running), DECODES // 2)
    kept = dict.fromkeys([place for _, place in sorted(holding)[:2]])
    kept.update(dict.fromkeys(in_use))
    kept.update(dict.fromkeys(place for _, place in by_work[:DECODES]))
    return [decodes[place] for place in itertools.islice(kept, DECODES)] or decodes[:DECODES]


def _first(scored: list[_Scored], request: InferenceRequest) -> _Scored:
    """The best; equals are shared out by the request's tiebreak."""
    most = max(s.score for s in scored)
    equals = [s for s in scored if s.score > most - 1e-9]
    return equals[int(request.tiebreak * len(equals))]


def _uncounted(request: InferenceRequest, decodes: Sequence[TargetView]) -> Decision:
    """Nothing can be predicted of a prompt that nobody counted: the role that fits, then the least loaded."""
    fitting = [t for t in decodes if t.role.decodes] or decodes
    reason = Reason.NOT_COUNTED if request.splittable else Reason.NOT_SPLITTABLE
    return Decision(Path.LOCAL, least_loaded(fitting, request).target, reason)


# --- why ----------------------------------------------------------------------------------------------------------


def _why_alone(request: InferenceRequest) -> Reason:
    return Reason.NO_PREFILL if request.splittable else Reason.NOT_SPLITTABLE


def _why_there(here: _Scored, there: _Scored) -> Reason:
    if here.lost - there.lost > max(0.0, there.chance - here.chance):
        return Reason.PROTECTS_STREAMS
    if here.way.prefill.queue_s > here.way.prefill.times.whole_s:
        return Reason.DECODE_BUSY
    if there.way.mean_s < here.way.mean_s:
        return Reason.PREFILL_FASTER
    return Reason.PROTECTS_STREAMS  # this one's own later steps, from the prefills that land where it would decode


def _why_here(request: InferenceRequest, here: _Scored, there: _Scored) -> Reason:
    """What makes the way through another prefill slower is named by its largest part."""
    way = there.way
    if 2 * here.way.prefill.uncached_tokens <= (request.prompt_tokens or 0):
        return Reason.CACHE_HOT
    if there.lost > here.lost + 0.01 and there.way.mean_s < here.way.mean_s:
        return Reason.PROTECTS_STREAMS
    queue_s = way.prefill.queue_s + way.room_wait_s - here.way.prefill.queue_s
    moving_s = way.transfer_s + way.handoff_s
    if way.link_wait_s > max(queue_s, moving_s):
        return Reason.LINK_BUSY
    if queue_s > moving_s:
        return Reason.PREFILL_BUSY
    return Reason.TRANSFER_SLOWER if way.transfer_s > way.handoff_s else Reason.SHORT_PROMPT


def _decision(request: InferenceRequest, found: _Best, chosen: _Scored, reason: Reason) -> Decision:
    way, here, there = chosen.way, found.here, found.there
    decode = way.decode.target.target
    path = Path.REMOTE_PREFILL if way.remote else Path.LOCAL
    if not way.remote and cached_elsewhere_tokens(request, decode) >= COMPUTE_BLOCK_TOKENS:
        path = Path.RECOMPUTE
    local_path = path if not way.remote else Path.LOCAL
    terms = {**here.way.terms(), "local_chance": here.chance, "local_lost": here.lost, "local_score": here.score}
    ttft = {local_path: here.way.ttft}
    if there is not None:
        terms |= {**there.way.terms(), "remote_chance": there.chance}
        terms |= {"remote_lost": there.lost, "remote_score": there.score}
        ttft[Path.REMOTE_PREFILL] = there.way.ttft
    prefill = way.prefill.target.target if way.remote else None
    return Decision(path, decode, reason, prefill, terms, ttft, chosen.chance, chosen.chance - chosen.lost)

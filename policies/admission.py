"""Whether a decision has room now, in KV bytes on both sides and on the link, and whether serving it can still help."""

from __future__ import annotations

from dataclasses import dataclass, replace

from disagg_router.errors import ErrorCode
from disagg_router.interfaces import Admission, Claim, Reject, Reserved, Wait
from disagg_router.model import Decision, InferenceRequest, Target
from disagg_router.policies.forecast import handed_off_in_s, streams_end_in_s
from disagg_router.policies.harm import chance_below
from disagg_router.timing import CostSnapshot, LinkTiming, TargetTiming, attention
from disagg_router.view import ClusterView, TargetLoad

LINK_SHARE = 0.5  # of what is left of the TTFT objective may go into moving KV, what is in flight before it included
UNKNOWN_SD = 0.5  # relative deviation of a prediction from which on it counts as not known
SOONEST_RETRY_S = 1.0
GOOD_ALONE = 0.5  # from this chance on a request would have met its objectives but for the others


class KvAdmission:
    """Holds a request back until its KV fits, refuses one that cannot be served in time.

    `max_wait_s`: room that is predicted to take longer to free is refused at once. `reject_below`: refused is also what
    has less than this chance to meet its objectives and would meet them on idle targets; None or 0 refuses nothing for
    its objectives.
    """

    def __init__(self, *, max_wait_s: float = 30.0, reject_below: float | None = 0.1) -> None:
        self._max_wait_s, self._reject_below = max_wait_s, reject_below or 0.0

    def check(self, request: InferenceRequest, decision: Decision, view: ClusterView) -> Admission:
        asked = _asked(request, decision, view)
        wait = _wait(asked)
        if _chance(request, decision) < self._reject_below and (late := self._late(asked, wait)) is not None:
            return late
        if wait is None:
            return Reserved(asked.claim)
        return Reject(wait.code, wait.ready_s) if wait.ready_s > self._max_wait_s else wait

    def _late(self, asked: _Asked, wait: Wait | None) -> Reject | None:
        """None when nothing that passes is in its way: then another try would be no better. Objectives that would not
        be met on idle targets either refuse nobody: tighter than the hardware, they would shut the service."""
        if asked.request.excluded:
            return None  # it was let in once, and what failed since is no fault of its own
        if asked.alone_chance < GOOD_ALONE or not (wait or asked.queued or asked.in_company):
            return None
        passing_s = asked.passing_s()
        if wait is not None:
            passing_s[wait.code] += wait.ready_s
        code = max(passing_s, key=lambda code: passing_s[code])
        estimate = asked.decision.ttft.get(asked.decision.path)
        late_s = estimate.mean_s - asked.request.slo.ttft_s if estimate else 0.0
        retry_s = late_s if late_s > 0 else passing_s[code]
        return Reject(code, max(SOONEST_RETRY_S, retry_s, wait.ready_s if wait else 0.0))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A decision with what it would take and what is going on where it would land."""

    request: InferenceRequest
    decision: Decision
    now_s: float
    claim: Claim
    prompt_bytes: float
    sink: TargetLoad  # of the target that decodes
    source: TargetLoad  # of the one that prefills: the same when nothing is handed off
    sink_timing: TargetTiming
    source_timing: TargetTiming
    link: LinkTiming

    @property
    def remote(self) -> bool:
        return self.decision.prefill is not None

    @property
    def in_flight_bytes(self) -> float:
        return max(self.source.out_bytes, self.sink.in_bytes) if self.remote else 0.0

    @property
    def cached_tokens(self) -> int:
        return max(0, (self.request.prompt_tokens or 0) - self.claim.prefill_tokens)

    @property
    def alone_s(self) -> float:
        """Its TTFT if it were the only request."""
        claim = self.claim
        prefill_s = self.source_timing.prefill_mean_s(claim.prefill_tokens, self.cached_tokens)
        if not self.remote:
            return prefill_s
        return prefill_s + self.link.handoff_s + self.link.transfer_mean_s(claim.link_bytes, 0.0)

    @property
    def alone_chance(self) -> float:
        """That it would meet its objectives then."""
        slo = self.request.slo
        step_s = self.sink_timing.step_mean_s(1, self.request.prompt_tokens or 0)
        chance = chance_below(slo.ttft_s, self.alone_s, 0.0) * chance_below(slo.tpot_s, step_s, 0.0)
        return chance * chance_below(slo.max_gap_s, step_s, 0.0)

    @property
    def queued(self) -> bool:
        """Something must be done before its prefill or its transfer starts."""
        return self.source.backlog_s(self.now_s) > 0 or self.in_flight_bytes > 0

    @property
    def in_company(self) -> bool:
        """One of its targets works for somebody else."""
        return any(load.requests or load.backlog_s(self.now_s) > 0 for load in (self.sink, self.source))

    def passing_s(self) -> dict[ErrorCode, float]:
        """What the others cost it, by what has to empty for it to be better. Equals are put down to decoding."""
        request, streams = self.request, self.sink.streams
        step_s = self.sink_timing.step_mean_s(streams.running, streams.context_tokens)
        slow_s = request.output_tokens * max(0.0, step_s - request.slo.tpot_s)
        beside_s = 0.0
        if not self.remote:
            alone_s = self.source_timing.prefill_mean_s(self.claim.prefill_tokens, self.cached_tokens)
            beside_s = max(0.0, self.claim.prefill_s - alone_s)
        return {
            ErrorCode.DECODE_FULL: slow_s + beside_s,
            ErrorCode.LINK_FULL: self.in_flight_bytes / self.link.bytes_per_s,
            ErrorCode.PREFILL_FULL: self.source.backlog_s(self.now_s),
        }


def _asked(request: InferenceRequest, decision: Decision, view: ClusterView) -> _Asked:
    token_bytes = view.costs.kv_bytes_per_token
    prompt_bytes = (request.prompt_tokens or 0) * token_bytes
    sink = _load(view, decision.decode)
    source = sink if decision.prefill is None else _load(view, decision.prefill)
    limit_tokens = request.max_output_tokens
    output_tokens = request.output_tokens if limit_tokens is None else min(request.output_tokens, limit_tokens)
    # No claim is larger than all there is: what fits an empty target must not wait for ever.
    claim = Claim(min(prompt_bytes + output_tokens * token_bytes, sink.kv_capacity_bytes))
    if decision.prefill is not None:
        link_bytes = request.uncached_tokens(decision.decode) * token_bytes
        claim = replace(claim, prefill_kv_bytes=min(prompt_bytes, source.kv_capacity_bytes), link_bytes=link_bytes)
    return _Asked(
        request=request,
        decision=decision,
        now_s=view.now_s,
        claim=_with_prefill(claim, request, decision.prefiller, source, view.costs),
        prompt_bytes=prompt_bytes,
        sink=sink,
        source=source,
        sink_timing=view.costs.of(decision.decode),
        source_timing=view.costs.of(decision.prefiller),
        link=view.costs.between(decision.prefiller, decision.decode),
    )


def _load(view: ClusterView, target: Target) -> TargetLoad:
    for seen in view.targets:
        if seen.target.instance == target.instance and seen.target == target:  # the first alone is much cheaper
            return seen.load
    return TargetLoad()


def _with_prefill(
    claim: Claim, request: InferenceRequest, target: Target, load: TargetLoad, costs: CostSnapshot
) -> Claim:
    """What the prompt costs to compute; nothing is known of one that nobody counted."""
    if request.prompt_tokens is None:
        return claim
    streams, uncached_tokens = load.streams, request.uncached_tokens(target)
    cached_tokens = request.prompt_tokens - uncached_tokens
    times = costs.of(target).prefill(uncached_tokens, cached_tokens, streams.running, streams.context_tokens)
    return replace(
        claim,
        prefill_tokens=uncached_tokens,
        prefill_attention=attention(uncached_tokens, cached_tokens),
        prefill_s=times.whole_s,
        prefill_sd_s=times.sd_s,
    )


def _chance(request: InferenceRequest, decision: Decision) -> float:
    """That it meets its objectives; 1 when nobody can say. What it has waited is certain, whatever else is not."""
    estimate = decision.ttft.get(decision.path)
    if estimate is not None and estimate.sd_s > UNKNOWN_SD * (estimate.mean_s - request.waited_s):
        return chance_below(request.slo.ttft_s, request.waited_s, 0.0)
    if decision.chance is not None:
        return decision.chance
    return 1.0 if estimate is None else chance_below(request.slo.ttft_s, *estimate)


# --- room -----------------------------------------------------------------------------------------------------------


def _wait(asked: _Asked) -> Wait | None:
    """For the last of what it needs to free. Without a count there is nothing to wait for."""
    if asked.request.prompt_tokens is None:
        return None
    waits = [wait for wait in (_for_decode(asked), _for_prefill(asked), _for_link(asked)) if wait is not None]
    return max(waits, key=lambda wait: wait.ready_s, default=None)


def _for_decode(asked: _Asked) -> Wait | None:
    missing_bytes = _missing_bytes(asked.sink, asked.claim.decode_kv_bytes, asked.prompt_bytes)
    if missing_bytes <= 0:
        return None
    frees_s = streams_end_in_s(asked.request, asked.sink, asked.sink_timing, missing_bytes)
    return Wait(ErrorCode.DECODE_FULL, frees_s)


def _for_prefill(asked: _Asked) -> Wait | None:
    """A prefill's KV is held until it has been pulled."""
    missing_bytes = _missing_bytes(asked.source, asked.claim.prefill_kv_bytes, asked.prompt_bytes)
    if not asked.remote or missing_bytes <= 0:
        return None
    frees_s = handed_off_in_s(asked.request, asked.source, asked.source_timing, asked.link, missing_bytes, asked.now_s)
    return Wait(ErrorCode.PREFILL_FULL, frees_s)


def _for_link(asked: _Asked) -> Wait | None:
    """An idle link takes any transfer. One that is late already is judged as if half of its objective were left: with
    less the oldest would be the last to be let in."""
    in_flight_bytes, slo_s = asked.in_flight_bytes, asked.request.slo.ttft_s
    if in_flight_bytes <= 0 or asked.claim.link_bytes <= 0:
        return None
    left_s = max(slo_s - asked.request.waited_s, slo_s / 2)
    over_bytes = in_flight_bytes + asked.claim.link_bytes - LINK_SHARE * left_s * asked.link.bytes_per_s
    if over_bytes <= 0:
        return None
    return Wait(ErrorCode.LINK_FULL, min(over_bytes, in_flight_bytes) / asked.link.bytes_per_s)


def _missing_bytes(load: TargetLoad, claim_bytes: float, prompt_bytes: float) -> float:
    """A prompt that is larger than all there is will be refused by the engine, which says it best."""
    return 0.0 if prompt_bytes > load.kv_capacity_bytes else claim_bytes - load.kv_free_bytes

"""What serving a request would take: the terms of one target as the one that prefills, as the one that decodes, and of
a way through both (design: queue + prefill + transfer + handoff + step)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from disagg_router.model import Decision, Estimate, InferenceRequest
from disagg_router.timing import LinkTiming, PrefillTimes, TargetTiming
from disagg_router.view import ClusterView, TargetLoad, TargetView

_SHARED_TERMS = (
    *("ttft_s", "ttft_sd_s", "uncached_tokens", "queue_s"),
    *("prefill_s", "stall_s", "pause_s", "step_s"),
)
_LOCAL_TERMS = tuple(f"local_{name}" for name in _SHARED_TERMS)
_REMOTE_TERMS = tuple(
    f"remote_{name}"
    for name in (*_SHARED_TERMS, "moved_tokens", "room_wait_s", "link_wait_s", "transfer_s", "handoff_s")
)


class PrefillTerms(NamedTuple):
    """Of the target that would compute the prompt."""

    target: TargetView
    uncached_tokens: int
    queue_s: float
    queue_sd_s: float
    times: PrefillTimes


class DecodeTerms(NamedTuple):
    """Of the target that would decode. `step_s` with this request in the batch, `more_s` by how much that is longer
    than without. `first_step_s` is the step that a handoff's first token waits for: a prefill may be part of it."""

    target: TargetView
    missing_tokens: int  # of the prompt, not held there: what a handoff has to move
    step_s: float
    sd_s: float
    more_s: float
    first_step_s: float


class Way(NamedTuple):
    """How one request could be served: by `decode` alone, or handed off to it by `prefill`. `mean_s` and `sd_s` are of
    its TTFT, from the request's arrival on; the parts are taken for independent. `room_wait_s`: until the
    prompt's KV fits at its source, beyond the queue there."""

    prefill: PrefillTerms
    decode: DecodeTerms
    remote: bool
    mean_s: float
    sd_s: float
    room_wait_s: float = 0.0
    link_wait_s: float = 0.0
    transfer_s: float = 0.0
    handoff_s: float = 0.0

    @property
    def ttft(self) -> Estimate:
        return Estimate(self.mean_s, self.sd_s)

    def terms(self) -> Mapping[str, float]:
        """Every number of it, for the decision's record."""
        prefill, decode = self.prefill, self.decode
        times = prefill.times
        shared = (
            *(self.mean_s, self.sd_s, float(prefill.uncached_tokens), prefill.queue_s),
            *(times.whole_s, times.stall_s, times.pause_s, decode.step_s),
        )
        if not self.remote:
            return dict(zip(_LOCAL_TERMS, shared, strict=True))
        moving = float(decode.missing_tokens), self.room_wait_s, self.link_wait_s, self.transfer_s, self.handoff_s
        return dict(zip(_REMOTE_TERMS, shared + moving, strict=True))


def prefill_terms(request: InferenceRequest, view: ClusterView, target: TargetView) -> PrefillTerms:
    load, timing = target.load, view.costs.of(target.target)
    prompt_tokens, cached_tokens = request.prompt_tokens or 0, request.cached_tokens.get(target.target, 0)
    uncached_tokens = prompt_tokens - cached_tokens if prompt_tokens > cached_tokens else 0
    queue_s, queue_sd_s = load.prefills_end_s - view.now_s, load.prefills_sd_s
    if queue_s < 0:
        queue_s = queue_sd_s = 0.0
    streams = load.streams
    times = timing.prefill(uncached_tokens, cached_tokens, streams.running, streams.context_tokens)
    return PrefillTerms(target, uncached_tokens, queue_s, queue_sd_s, times)


def decode_terms(request: InferenceRequest, view: ClusterView, target: TargetView) -> DecodeTerms:
    load, timing = target.load, view.costs.of(target.target)
    # Streams that were promised and have not started yet will be there when this one is.
    running = max(load.streams.running, load.decodes) + load.foreign
    prompt_tokens = request.prompt_tokens or 0
    each_tokens = load.streams.context_tokens / load.streams.running if load.streams.running else prompt_tokens
    context_tokens = each_tokens * running
    now_s = timing.step_mean_s(running, context_tokens) if running else timing.step_d_s
    step_s = timing.step_mean_s(running + 1, context_tokens + prompt_tokens)
    first_step_s = step_s
    if load.prefill_tokens and load.backlog_s(view.now_s) > 0:
        chunk_tokens = min(float(load.prefill_tokens), max(1.0, timing.chunk_tokens - running))
        first_step_s = timing.mixed_step_mean_s(chunk_tokens, running, context_tokens)
    missing_tokens = max(0, prompt_tokens - request.cached_tokens.get(target.target, 0))
    return DecodeTerms(target, missing_tokens, step_s, step_s * timing.step_sd, max(0.0, step_s - now_s), first_step_s)


def local_way(request: InferenceRequest, prefill: PrefillTerms, decode: DecodeTerms) -> Way:
    mean_s = request.waited_s + prefill.queue_s + prefill.times.whole_s
    return Way(prefill, decode, False, mean_s, prefill.queue_sd_s + prefill.times.sd_s)


def remote_way(request: InferenceRequest, view: ClusterView, prefill: PrefillTerms, decode: DecodeTerms) -> Way:
    source, sink = prefill.target, decode.target
    link = view.costs.between(source.target, sink.target)
    out_bytes, in_bytes = source.load.out_bytes, sink.load.in_bytes
    transfer_s = decode.missing_tokens * view.costs.kv_bytes_per_token / link.bytes_per_s
    room_wait_s = 0.0
    prompt_bytes = (request.prompt_tokens or 0) * view.costs.kv_bytes_per_token
    if source.load.kv_free_bytes < prompt_bytes <= source.load.kv_capacity_bytes:
        timing, missing_bytes = view.costs.of(source.target), prompt_bytes - source.load.kv_free_bytes
        room_s = handed_off_in_s(request, source.load, timing, link, missing_bytes, view.now_s)
        room_wait_s = max(0.0, room_s - prefill.queue_s)
    prefilled_s = prefill.queue_s + room_wait_s + prefill.times.whole_s
    # What is in flight now has until this prefill is done to get out of the way.
    link_wait_s = (out_bytes if out_bytes > in_bytes else in_bytes) / link.bytes_per_s - prefilled_s
    if link_wait_s < 0:
        link_wait_s = 0.0
    moving_s = transfer_s + link.handoff_s
    mean_s = request.waited_s + prefilled_s + link_wait_s + moving_s + decode.first_step_s
    sd_s = math.hypot(prefill.queue_sd_s + prefill.times.sd_s, moving_s * link.sd)
    return Way(prefill, decode, True, mean_s, sd_s, room_wait_s, link_wait_s, transfer_s, link.handoff_s)


def handed_off_in_s(
    request: InferenceRequest,
    load: TargetLoad,
    timing: TargetTiming,
    link: LinkTiming,
    missing_bytes: float,
    now_s: float,
) -> float:
    """When a source will have that much more room: what was prefilled there goes once it is pulled. Where that is not
    enough, with soft roles streams hold the rest."""
    if load.pinned_bytes < missing_bytes:
        return streams_end_in_s(request, load, timing, missing_bytes)
    stay_s = load.backlog_s(now_s) + load.out_bytes / link.bytes_per_s
    return stay_s * missing_bytes / load.pinned_bytes


def streams_end_in_s(request: InferenceRequest, load: TargetLoad, timing: TargetTiming, missing_bytes: float) -> float:
    """When the streams that end will have left that much more room; without one to look at, a stream like this one.
    All that is held has left after the time that the mean stream takes, evenly on the way there."""
    streams = load.streams
    to_come_tokens = streams.to_come_tokens if streams.running else request.output_tokens
    stay_s = max(1.0, to_come_tokens) * timing.step_mean_s(max(1, streams.running), streams.context_tokens)
    held_bytes = load.kv_capacity_bytes - load.kv_free_bytes
    known = 0 < held_bytes < math.inf
    return stay_s * min(1.0, missing_bytes / held_bytes) if known else stay_s


def predicted(request: InferenceRequest, view: ClusterView, decision: Decision) -> Estimate | None:
    """The TTFT of a decision whose policy predicts nothing. None when nobody counted the prompt."""
    if request.prompt_tokens is None:
        return None
    targets = {t.target: t for t in view.targets}
    decode = decode_terms(request, view, targets[decision.decode])
    prefill = prefill_terms(request, view, targets[decision.prefiller])
    if decision.prefill is None:
        return local_way(request, prefill, decode).ttft
    return remote_way(request, view, prefill, decode).ttft

"""The earliest first token for this request, whatever that does to others."""

from __future__ import annotations

from disagg_router.model import Decision, InferenceRequest, Path, Reason
from disagg_router.policies.candidates import decoders, local, partners
from disagg_router.policies.forecast import Way, decode_terms, local_way, prefill_terms, remote_way
from disagg_router.view import ClusterView


class TtftMin:
    """Every decode target alone and every tested pair, by predicted TTFT."""

    needs_token_count = True
    soft_roles = False

    def decide(self, request: InferenceRequest, view: ClusterView) -> Decision:
        if request.prompt_tokens is None:
            return local(request, view, Reason.NOT_COUNTED)
        ways = _ways(request, view)
        here = min((way for way in ways if not way.remote), key=_mean_s)
        there = min((way for way in ways if way.remote), key=_mean_s, default=None)
        terms = {**here.terms(), **(there.terms() if there else {})}
        ttft = {Path.LOCAL: here.ttft, **({Path.REMOTE_PREFILL: there.ttft} if there else {})}
        if there is None:
            reason = Reason.NO_PREFILL if request.splittable else Reason.NOT_SPLITTABLE
            return Decision(Path.LOCAL, here.decode.target.target, reason, None, terms, ttft)
        if _mean_s(there) < _mean_s(here):
            decode, prefill = there.decode.target.target, there.prefill.target.target
            return Decision(Path.REMOTE_PREFILL, decode, Reason.PREFILL_FASTER, prefill, terms, ttft)
        return Decision(Path.LOCAL, here.decode.target.target, Reason.TRANSFER_SLOWER, None, terms, ttft)


def _mean_s(way: Way) -> float:
    return way.mean_s


def _ways(request: InferenceRequest, view: ClusterView) -> list[Way]:
    ways = []
    for target in decoders(request, view):
        decode = decode_terms(request, view, target)
        ways.append(local_way(request, prefill_terms(request, view, target), decode))
        if request.splittable:
            for prefill in partners(request, view, target):
                ways.append(remote_way(request, view, prefill_terms(request, view, prefill), decode))
    return ways

"""Who may do what: the filters and pickers that the path policies with binding roles share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from disagg_router.errors import NoDecodeInstance
from disagg_router.model import Decision, InferenceRequest, Path, Reason
from disagg_router.view import ClusterView, TargetView


def usable(request: InferenceRequest, view: ClusterView) -> list[TargetView]:
    """The targets that have not failed this request."""
    return [t for t in view.targets if t.target not in request.excluded]


def decoders(request: InferenceRequest, view: ClusterView) -> list[TargetView]:
    """Decode and unified targets. Raises NoDecodeInstance when there is none."""
    able = [t for t in usable(request, view) if t.role.decodes]
    if not able:
        raise NoDecodeInstance("no decode instance is ready", retry_after_s=1)
    return able


def partners(request: InferenceRequest, view: ClusterView, decode: TargetView) -> list[TargetView]:
    """Prefill and unified targets of a tested pair with `decode`."""
    tested = [view.targets[place] for place in view.partners.get(decode.target.instance, ())]
    return [t for t in tested if t.role.prefills and t.target not in request.excluded]


def pick_decode(request: InferenceRequest, view: ClusterView) -> TargetView:
    """The decode target with the fewest requests. Raises NoDecodeInstance."""
    return least_loaded(decoders(request, view), request)


def pick_pair(
    request: InferenceRequest, view: ClusterView, decode: TargetView | None = None
) -> tuple[TargetView, TargetView] | None:
    """The least loaded prefill of `decode`; without one (or where no tested pair leads to it) that of the least
    loaded decode target that has a prefill."""
    if decode is None or not partners(request, view, decode):
        able = [t for t in usable(request, view) if t.role.decodes and partners(request, view, t)]
        if not able:
            return None
        decode = least_loaded(able, request)
    return least_loaded(partners(request, view, decode), request), decode


def remote(
    request: InferenceRequest,
    view: ClusterView,
    reason: Reason,
    terms: dict[str, float] | None = None,
    decode: TargetView | None = None,
) -> Decision:
    """Prefill elsewhere, or local with the reason why that cannot be. `decode` is the target that was judged."""
    if not request.splittable:
        return local(request, view, Reason.NOT_SPLITTABLE, terms)
    pair = pick_pair(request, view, decode)
    if pair is None:
        return local(request, view, Reason.NO_PREFILL, terms)
    prefill, decode = pair
    return Decision(Path.REMOTE_PREFILL, decode.target, reason, prefill.target, terms or {})


def local(
    request: InferenceRequest, view: ClusterView, reason: Reason, terms: dict[str, float] | None = None
) -> Decision:
    return Decision(Path.LOCAL, pick_decode(request, view).target, reason, None, terms or {})


def least_loaded(targets: Iterable[TargetView], request: InferenceRequest) -> TargetView:
    """Fewest requests, then most of the prompt cached."""
    return best(targets, request, lambda t: (t.load.requests, -request.cached_tokens.get(t.target, 0)))


def best(
    targets: Iterable[TargetView], request: InferenceRequest, weight: Callable[[TargetView], tuple[float, ...]]
) -> TargetView:
    """The least weight. What is equal is shared out by the request's own tiebreak, so that replicas do not march in
    step."""
    weighed = [(weight(t), t) for t in targets]
    least = min(w for w, _ in weighed)
    equals = [t for w, t in weighed if w == least]
    return equals[int(request.tiebreak * len(equals))]

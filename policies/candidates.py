"""Who may do what: the filters and the picker that all path policies share."""

from __future__ import annotations

from disagg_router.errors import NoDecodeInstance
from disagg_router.model import ClusterView, Decision, InferenceRequest, Pair, Path, Reason, TargetView


def pick_decode(request: InferenceRequest, view: ClusterView) -> TargetView:
    """The decode target with the fewest requests. Raises NoDecodeInstance."""
    able = [t for t in view.targets if t.role.decodes and t.target not in request.excluded]
    if not able:
        raise NoDecodeInstance("no decode instance is ready", retry_after_s=1)
    return _least_loaded(able, request)


def pick_pair(
    request: InferenceRequest, view: ClusterView, decode: TargetView | None = None
) -> tuple[TargetView, TargetView] | None:
    """The least loaded prefill of `decode`; without one (or where no tested pair leads to it) that of the least
    loaded decode target that has a prefill."""
    usable = [t for t in view.targets if t.target not in request.excluded]
    prefills = [t for t in usable if t.role.prefills]

    def partners(decode: TargetView) -> list[TargetView]:
        instance = decode.target.instance
        return [p for p in prefills if Pair(p.target.instance, instance) in view.pairs]

    if decode is None or not partners(decode):
        able = [t for t in usable if t.role.decodes and partners(t)]
        if not able:
            return None
        decode = _least_loaded(able, request)
    return _least_loaded(partners(decode), request), decode


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


def _least_loaded(targets: list[TargetView], request: InferenceRequest) -> TargetView:
    """Fewest requests, then most of the prompt cached; what is still equal is shared out by the request's own tiebreak,
    so that replicas do not march in step."""

    def weight(view: TargetView) -> tuple[int, int]:
        return view.load.requests, -request.cached_tokens.get(view.target, 0)

    least = min(weight(t) for t in targets)
    equals = [t for t in targets if weight(t) == least]
    return equals[int(request.tiebreak * len(equals))]

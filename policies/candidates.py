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


def pick_pair(request: InferenceRequest, view: ClusterView) -> tuple[TargetView, TargetView] | None:
    """The least loaded decode target that a tested pair leads to, and its least loaded prefill."""
    if not request.splittable:
        return None
    usable = [t for t in view.targets if t.target not in request.excluded]
    prefills = [t for t in usable if t.role.prefills]

    def partners(decode: TargetView) -> list[TargetView]:
        instance = decode.target.instance
        return [p for p in prefills if Pair(p.target.instance, instance) in view.pairs]

    able = [t for t in usable if t.role.decodes and partners(t)]
    if not able:
        return None
    decode = _least_loaded(able, request)
    return _least_loaded(partners(decode), request), decode


def remote(
    request: InferenceRequest, view: ClusterView, reason: Reason, terms: dict[str, float] | None = None
) -> Decision:
    """Prefill elsewhere, or local with the reason why that cannot be."""
    pair = pick_pair(request, view)
    if pair is not None:
        prefill, decode = pair
        return Decision(Path.REMOTE_PREFILL, decode.target, reason, prefill.target, terms or {})
    why = Reason.NO_PREFILL if request.splittable else Reason.NOT_SPLITTABLE
    return local(request, view, why, terms)


def local(
    request: InferenceRequest, view: ClusterView, reason: Reason, terms: dict[str, float] | None = None
) -> Decision:
    return Decision(Path.LOCAL, pick_decode(request, view).target, reason, None, terms or {})


def _least_loaded(targets: list[TargetView], request: InferenceRequest) -> TargetView:
    """Fewest requests; equals are shared out by the request's own tiebreak, so that replicas do not march in step."""

    def weight(view: TargetView) -> int:
        return view.load.prefills + view.load.decodes

    least = min(weight(t) for t in targets)
    equals = [t for t in targets if weight(t) == least]
    return equals[int(request.tiebreak * len(equals))]

"""Where there is less to do: of the decode target and its prefills the one with the fewest requests prefills."""

from __future__ import annotations

from disagg_router.model import Decision, InferenceRequest, Path, Reason
from disagg_router.policies.candidates import least_loaded, local, partners, pick_decode
from disagg_router.view import ClusterView


class LeastLoaded:
    """Knows neither lengths nor caches. Equal means local."""

    needs_token_count = False
    soft_roles = False

    def decide(self, request: InferenceRequest, view: ClusterView) -> Decision:
        if not request.splittable:
            return local(request, view, Reason.NOT_SPLITTABLE)
        decode = pick_decode(request, view)
        able = partners(request, view, decode)
        if not able:
            return local(request, view, Reason.NO_PREFILL)
        prefill = least_loaded(able, request)
        terms = {"decode_requests": float(decode.load.requests), "prefill_requests": float(prefill.load.requests)}
        if prefill.load.requests < decode.load.requests:
            return Decision(Path.REMOTE_PREFILL, decode.target, Reason.DECODE_BUSY, prefill.target, terms)
        return Decision(Path.LOCAL, decode.target, Reason.PREFILL_BUSY, None, terms)

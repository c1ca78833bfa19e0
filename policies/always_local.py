"""Nothing is ever split: each request is served whole by a decode or unified instance."""

from __future__ import annotations

from disagg_router.model import ClusterView, Decision, InferenceRequest, Reason
from disagg_router.policies.candidates import local


class AlwaysLocal:
    needs_token_count = False

    def decide(self, request: InferenceRequest, view: ClusterView) -> Decision:
        return local(request, view, Reason.POLICY)

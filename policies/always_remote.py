"""Every request that can be split is prefilled elsewhere."""

from __future__ import annotations

from disagg_router.model import Decision, InferenceRequest, Reason
from disagg_router.policies.candidates import remote
from disagg_router.view import ClusterView


class AlwaysRemote:
    """Falls back to local, and says so, when no tested pair can serve the request."""

    needs_token_count = False
    soft_roles = False

    def decide(self, request: InferenceRequest, view: ClusterView) -> Decision:
        return remote(request, view, Reason.POLICY)

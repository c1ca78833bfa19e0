"""Nothing is ever split: every instance serves its own requests whole, whatever its role."""

from __future__ import annotations

from disagg_router.errors import NoDecodeInstance
from disagg_router.model import Decision, InferenceRequest, Path, Reason
from disagg_router.policies.candidates import least_loaded, usable
from disagg_router.view import ClusterView


class AlwaysLocal:
    needs_token_count = False
    soft_roles = True

    def decide(self, request: InferenceRequest, view: ClusterView) -> Decision:
        able = usable(request, view)
        if not able:
            raise NoDecodeInstance("no instance is ready", retry_after_s=1)
        return Decision(Path.LOCAL, least_loaded(able, request).target, Reason.POLICY)

"""A path the client asked for (`x-disagg-path`), laid over any policy; only where the config allows it."""

from __future__ import annotations

import dataclasses

from disagg_router.errors import BadRequest, NoPrefillInstance
from disagg_router.interfaces import PathPolicy
from disagg_router.model import Decision, InferenceRequest, Path, Reason
from disagg_router.policies.candidates import local, remote
from disagg_router.view import ClusterView


class PathOverride:
    """Decides as `inner` does unless the request names its path."""

    def __init__(self, inner: PathPolicy) -> None:
        self._inner = inner
        self.needs_token_count, self.soft_roles = inner.needs_token_count, inner.soft_roles

    def decide(self, request: InferenceRequest, view: ClusterView) -> Decision:
        if request.forced_path is None:
            return self._inner.decide(request, view)
        if request.forced_path is not Path.REMOTE_PREFILL:
            # Without a tier there is nothing to recompute against: it does what local does, under its own name.
            return dataclasses.replace(local(request, view, Reason.FORCED), path=request.forced_path)
        decision = remote(request, view, Reason.FORCED)
        if decision.reason is Reason.NOT_SPLITTABLE:
            raise BadRequest("this request must stay whole on one instance, so x-disagg-path cannot be remote_prefill")
        if decision.prefill is None:
            raise NoPrefillInstance("no tested prefill instance leads to a ready decode instance", retry_after_s=1)
        return decision

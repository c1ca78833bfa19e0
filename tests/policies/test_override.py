"""x-disagg-path: a forced path wins over the policy, and never quietly becomes another one."""

from __future__ import annotations

import pytest

from disagg_router.errors import BadRequest, NoPrefillInstance
from disagg_router.model import Path, Reason
from disagg_router.policies.always_local import AlwaysLocal
from disagg_router.policies.always_remote import AlwaysRemote
from disagg_router.policies.override import PathOverride
from tests.builders import request, view

PAIRED = view("p0", "d0", pairs="p0>d0")


@pytest.mark.parametrize("forced", list(Path))
def test_the_forced_path_is_named_as_forced(forced):
    """recompute without a tier does what local does, under its own name."""
    inner = AlwaysLocal() if forced is Path.REMOTE_PREFILL else AlwaysRemote()
    decision = PathOverride(inner).decide(request(forced_path=forced), PAIRED)
    assert (decision.path, decision.reason) == (forced, Reason.FORCED)
    assert (decision.prefill is not None) == (forced is Path.REMOTE_PREFILL)


def test_without_a_header_the_policy_decides():
    """The override is laid over any policy."""
    assert PathOverride(AlwaysRemote()).decide(request(), PAIRED).reason is Reason.POLICY


def test_remote_without_a_pair_is_refused():
    """A test that forces a path must not be served another one."""
    with pytest.raises(NoPrefillInstance):
        PathOverride(AlwaysLocal()).decide(request(forced_path=Path.REMOTE_PREFILL), view("p0", "d0"))


def test_remote_for_a_request_that_must_stay_whole_is_refused():
    """The client learns that it is its request, not the fleet."""
    asked = request(forced_path=Path.REMOTE_PREFILL, splittable=False)
    with pytest.raises(BadRequest):
        PathOverride(AlwaysLocal()).decide(asked, PAIRED)

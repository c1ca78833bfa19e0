"""always_remote: split whatever can be split."""

from __future__ import annotations

from disagg_router.model import Path, Reason
from disagg_router.policies.always_remote import AlwaysRemote
from tests.builders import request, target, view


def test_every_request_is_split():
    """Without asking for its length."""
    policy = AlwaysRemote()
    decision = policy.decide(request(), view("p0", "d0", pairs="p0>d0"))
    assert (decision.path, decision.reason) == (Path.REMOTE_PREFILL, Reason.POLICY)
    assert (decision.prefill, decision.decode) == (target("p0"), target("d0"))
    assert policy.needs_token_count is False


def test_unified_instances_prefill_for_each_other():
    """An instance is never its own partner: only tested pairs count."""
    decision = AlwaysRemote().decide(request(), view("u0", "u1", pairs="u0>u1"))
    assert (decision.prefill, decision.decode) == (target("u0"), target("u1"))


def test_without_a_pair_it_is_local_and_says_so():
    """Availability before principle."""
    decision = AlwaysRemote().decide(request(), view("p0", "d0"))
    assert (decision.path, decision.reason) == (Path.LOCAL, Reason.NO_PREFILL)

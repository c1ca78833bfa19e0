"""least_loaded: the prompt is computed where there are fewer requests."""

from __future__ import annotations

import pytest

from disagg_router.model import Path, Reason
from disagg_router.policies.registry import build_policy
from disagg_router.view import TargetLoad
from tests.builders import request, view

LOCAL, REMOTE = Path.LOCAL, Path.REMOTE_PREFILL


@pytest.mark.parametrize(
    ("prefills", "decodes", "path"), [(0, 0, LOCAL), (1, 1, LOCAL), (2, 1, LOCAL), (0, 1, REMOTE), (1, 2, REMOTE)]
)
def test_equal_means_local(prefills, decodes, path):
    """A handoff has to be worth something."""
    cluster = view("p0", "d0", pairs="p0>d0", p0=TargetLoad(prefills=prefills), d0=decodes)
    assert build_policy("least_loaded", {}).decide(request(), cluster).path is path


@pytest.mark.parametrize(
    ("changes", "pairs", "reason"),
    [({"splittable": False}, "p0>d0", Reason.NOT_SPLITTABLE), ({}, "", Reason.NO_PREFILL)],
)
def test_without_a_choice_it_is_local(changes, pairs, reason):
    """And says why."""
    decision = build_policy("least_loaded", {}).decide(request(**changes), view("p0", "d0", pairs=pairs, d0=5))
    assert (decision.path, decision.reason) == (LOCAL, reason)

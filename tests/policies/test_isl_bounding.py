"""isl_bounding: local iff the uncached tokens are few and a small part of the prompt (Dynamo's rule)."""

from __future__ import annotations

import pytest

from disagg_router.errors import ConfigError
from disagg_router.model import Path, Reason
from disagg_router.policies.registry import build_policy
from tests.builders import request, target, view

LOCAL, REMOTE = Path.LOCAL, Path.REMOTE_PREFILL


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens", "path"),
    [
        (100, 0, REMOTE),  # short and cold: the share is 1
        (1000, 300, REMOTE),  # 700 of 1,000 is not below 0.7
        (1000, 301, LOCAL),
        (10_000, 7952, REMOTE),  # 2,048 is not below 2,048
        (10_000, 7953, LOCAL),
    ],
)
def test_both_bounds_must_hold(prompt_tokens, cached_tokens, path):
    """2,048 tokens and 0.7 of the prompt, both exclusive."""
    policy = build_policy("isl_bounding", {})
    asked = request(prompt_tokens=prompt_tokens, cached_tokens={target("d0"): cached_tokens})
    decision = policy.decide(asked, view("p0", "d0", pairs="p0>d0"))
    assert decision.path is path
    assert decision.reason is (Reason.CACHE_HOT if path is LOCAL else Reason.LONG_PROMPT)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"splittable": False}, Reason.NOT_SPLITTABLE), ({"prompt_tokens": None}, Reason.NOT_COUNTED)],
)
def test_what_cannot_be_judged_is_local(changes, reason):
    """And says why."""
    decision = build_policy("isl_bounding", {}).decide(request(**changes), view("p0", "d0", pairs="p0>d0"))
    assert (decision.path, decision.reason) == (LOCAL, reason)


@pytest.mark.parametrize("options", [{"tokens": 0}, {"share": 0.0}, {"share": 1.5}, {"tokens": "many"}])
def test_wrong_options_are_refused(options):
    """With the option's name in the sentence."""
    with pytest.raises(ConfigError, match=f"router.policy.{next(iter(options))}"):
        build_policy("isl_bounding", options)

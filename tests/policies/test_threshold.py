"""threshold: remote iff the uncached tokens on the chosen decode target reach T."""

from __future__ import annotations

from typing import Any

import pytest

from disagg_router.errors import ConfigError, NoDecodeInstance
from disagg_router.model import Path, Reason
from disagg_router.policies.registry import build_policy
from tests.builders import request, target, view

LOCAL, REMOTE = Path.LOCAL, Path.REMOTE_PREFILL


@pytest.mark.parametrize(
    ("threshold", "prompt_tokens", "cached_tokens", "path", "reason"),
    [
        (256, 255, 0, LOCAL, Reason.SHORT_PROMPT),
        (256, 256, 0, REMOTE, Reason.LONG_PROMPT),
        (256, 4000, 3900, LOCAL, Reason.SHORT_PROMPT),
        (256, 4000, 3744, REMOTE, Reason.LONG_PROMPT),
        (0, 3, 0, REMOTE, Reason.LONG_PROMPT),
        (0, 3, 3, REMOTE, Reason.LONG_PROMPT),
        (None, 100_000, 0, LOCAL, Reason.SHORT_PROMPT),
    ],
)
def test_c46_one_rule_counted_in_tokens(threshold, prompt_tokens, cached_tokens, path, reason):
    """0 means always, null never, and nothing is rounded to blocks."""
    policy = build_policy("threshold", {"tokens": threshold})
    asked = request(prompt_tokens=prompt_tokens, cached_tokens={target("d0"): cached_tokens})
    decision = policy.decide(asked, view("p0", "d0", pairs="p0>d0"))
    assert (decision.path, decision.reason) == (path, reason)
    assert decision.terms["uncached_tokens"] == prompt_tokens - cached_tokens


def test_the_default_is_256():
    """A threshold policy without options."""
    policy = build_policy("threshold", {})
    decide = [policy.decide(request(prompt_tokens=n), view("p0", "d0", pairs="p0>d0")).path for n in (255, 256)]
    assert decide == [LOCAL, REMOTE]


@pytest.mark.parametrize(
    ("cluster", "splittable", "reason"),
    [
        (view("d0", pairs="p0>d0"), True, Reason.NO_PREFILL),
        (view("p0", "d0"), True, Reason.NO_PREFILL),
        (view("p0", "d0", pairs="p0>d1"), True, Reason.NO_PREFILL),
        (view("p0", "d0", pairs="p0>d0"), False, Reason.NOT_SPLITTABLE),
    ],
)
def test_a_long_prompt_without_a_usable_pair_stays_local(cluster, splittable, reason):
    """Served, not refused; and the decision says why it was not split."""
    # The router does not have a request counted that it must not split.
    asked = request(prompt_tokens=9999 if splittable else None, splittable=splittable)
    decision = build_policy("threshold", {}).decide(asked, cluster)
    assert (decision.path, decision.reason, decision.prefill) == (LOCAL, reason, None)


def test_a_prompt_nobody_could_count_stays_local():
    """And is not taken for a short one. T=0 needs no count."""
    cluster = view("p0", "d0", pairs="p0>d0")
    assert build_policy("threshold", {}).decide(request(), cluster).reason is Reason.NOT_COUNTED
    assert build_policy("threshold", {"tokens": 0}).decide(request(), cluster).path is REMOTE


def test_the_target_that_was_judged_is_the_one_that_decodes():
    """Its cache is why the prompt was long or short. Another is taken only where no pair leads to it."""
    cached = request(prompt_tokens=1000, cached_tokens={target("d0"): 0, target("d1"): 900})
    busy: Any = {"d1": 1}
    decision = build_policy("threshold", {}).decide(cached, view("p0", "d0", "d1", pairs="p0>d0 p0>d1", **busy))
    assert (decision.decode, decision.terms["uncached_tokens"]) == (target("d0"), 1000)
    decision = build_policy("threshold", {}).decide(cached, view("p0", "d0", "d1", pairs="p0>d1", **busy))
    assert (decision.path, decision.decode) == (REMOTE, target("d1"))


def test_without_a_decode_instance_there_is_no_decision():
    """Roles are binding under this policy: a prefill instance does not decode."""
    with pytest.raises(NoDecodeInstance):
        build_policy("threshold", {}).decide(request(prompt_tokens=10), view("p0"))


def test_the_pair_with_the_least_load_is_taken():
    """Decode first, by its load; then the prefill among its partners."""
    cluster = view("p0", "p1", "d0", "d1", pairs="p0>d0 p1>d1 p0>d1", d0=3, d1=1)
    decision = build_policy("threshold", {}).decide(request(prompt_tokens=999, tiebreak=0.99), cluster)
    assert (decision.prefill, decision.decode) == (target("p1"), target("d1"))


def test_excluded_targets_are_not_chosen():
    """A target that failed this request is out of the question for it."""
    cluster = view("p0", "p1", "d0", "d1", pairs="p0>d0 p1>d1")
    asked = request(prompt_tokens=999, excluded=frozenset({target("d0"), target("p0")}))
    decision = build_policy("threshold", {}).decide(asked, cluster)
    assert (decision.prefill, decision.decode) == (target("p1"), target("d1"))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("treshold", {}, "not known: use one of always_local, always_remote, break_even, "),
        ("threshold", {"token": 3}, "router.policy.token is not an option of threshold: it has tokens"),
        ("threshold", {"tokens": "many"}, "router.policy.tokens: input should be a valid integer"),
        ("threshold", {"tokens": -1}, "router.policy.tokens: input should be greater than or equal to 0"),
        ("always_local", {"tokens": 1}, "router.policy.tokens is not an option of always_local: it has none"),
    ],
)
def test_wrong_options_are_named(name, options, says):
    """One sentence with the key in it."""
    with pytest.raises(ConfigError, match=says):
        build_policy(name, options)

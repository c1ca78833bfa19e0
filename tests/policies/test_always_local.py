"""always_local: nothing is split."""

from __future__ import annotations

from disagg_router.model import Path, Reason
from disagg_router.policies.always_local import AlwaysLocal
from tests.builders import request, target, view


def test_nothing_is_split():
    """However long the prompt; a prefill instance serves its own requests whole, too."""
    decisions = [
        AlwaysLocal().decide(request(prompt_tokens=100_000, tiebreak=t), view("p0", "d0", pairs="p0>d0"))
        for t in (0.0, 0.9)
    ]
    assert {(d.path, d.reason) for d in decisions} == {(Path.LOCAL, Reason.POLICY)}
    assert [d.decode for d in decisions] == [target("p0"), target("d0")]


def test_equals_are_shared_out_by_the_tiebreak():
    """The same inputs give the same decision, different requests different targets."""
    cluster = view("d0", "d1", "d2", "d3", d3=1)
    chosen = [AlwaysLocal().decide(request(tiebreak=t), cluster).decode for t in (0.0, 0.4, 0.99)]
    assert chosen == [target("d0"), target("d1"), target("d2")]

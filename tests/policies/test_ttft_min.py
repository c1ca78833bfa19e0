"""ttft_min: the earliest first token, whatever that does to others."""

from __future__ import annotations

import pytest

from disagg_router.model import Path, Reason
from disagg_router.policies.registry import build_policy
from disagg_router.view import StreamLoad, TargetLoad
from tests.builders import request, target, view

BUSY = TargetLoad(prefills=1, prefills_end_s=0.5)
STREAMS = TargetLoad(decodes=4, streams=StreamLoad(running=4, context_tokens=400.0))


@pytest.mark.parametrize(
    ("loads", "path", "prefill", "decode", "ttft_s"),
    [
        # 1,000 tokens: 10 ms + 1,000 x 0.1 ms. A handoff: 1 MB at 1 GB/s, 20 ms, and a step of 10 ms.
        ({}, Path.LOCAL, None, "d0", 0.11),
        ({"d0": BUSY}, Path.REMOTE_PREFILL, "p0", "d0", 0.11 + 0.001 + 0.02 + 0.01),
        ({"d0": BUSY, "p0": BUSY}, Path.LOCAL, None, "d0", 0.5 + 0.11),
        # Four streams: the step of the prompt's one chunk takes 4 ms more, and it breaks their pauses: no matter.
        ({"d0": STREAMS}, Path.LOCAL, None, "d0", 0.114),
    ],
)
def test_the_earliest_first_token_wins(loads, path, prefill, decode, ttft_s):
    """By hand from the builders' timing; `d0 busy` means half a second of prefills before this one."""
    asked = request(prompt_tokens=1000)
    decision = build_policy("ttft_min", {}).decide(asked, view("p0", "d0", pairs="p0>d0", **loads))
    assert (decision.path, decision.decode) == (path, target(decode))
    assert decision.prefill == (target(prefill) if prefill else None)
    assert decision.ttft[path].mean_s == pytest.approx(ttft_s)
    assert set(decision.ttft) == {Path.LOCAL, Path.REMOTE_PREFILL}


def test_the_cache_counts():
    """The target that holds 900 of 1,000 tokens is earlier: 10 ms + 100 x 0.1 ms."""
    asked = request(prompt_tokens=1000, cached_tokens={target("d1"): 900})
    decision = build_policy("ttft_min", {}).decide(asked, view("d0", "d1"))
    assert decision.decode == target("d1")
    assert decision.ttft[Path.LOCAL].mean_s == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, Reason.NO_PREFILL),
        ({"splittable": False}, Reason.NOT_SPLITTABLE),
        ({"prompt_tokens": None}, Reason.NOT_COUNTED),
    ],
)
def test_without_a_choice_it_is_local(changes, reason):
    """And says why."""
    decision = build_policy("ttft_min", {}).decide(request(**{"prompt_tokens": 9, **changes}), view("d0"))
    assert (decision.path, decision.reason) == (Path.LOCAL, reason)

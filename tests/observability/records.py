"""Records of requests with round numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from disagg_router.model import Decision, Estimate, InstanceId, Path, Reason, Slo, Target
from disagg_router.observability.decisions import DecisionLine, ObjectivesMet, Predicted
from disagg_router.observability.requests import RequestRecord
from tests.builders import request, target

LOCAL, REMOTE = Path.LOCAL, Path.REMOTE_PREFILL

REQUEST = request(
    id="r1-0a1b2c3d",
    stream=True,
    prompt_tokens=1000,
    cached_tokens={target("d0"): 320, Target(InstanceId("p0"), 1): 64},
    output_tokens=50.0,
    slo=Slo(ttft_s=0.5, tpot_s=0.1, max_gap_s=0.25),
)
DECISION = Decision(
    path=REMOTE,
    decode=target("d0"),
    prefill=Target(InstanceId("p0"), 1),
    reason=Reason.PREFILL_FASTER,
    terms={"uncached_tokens": 936.0, "free_bytes": float("inf")},
    ttft={REMOTE: Estimate(0.25, 0.05), LOCAL: Estimate(0.75, 0.125)},
    chance=0.9,
    gain=0.8,
)


def record(**changes: Any) -> RequestRecord:
    """Arrived at 100 s; 0.5 s to the first token, ten more in 1 s with one pause of 0.375 s, ended at 102 s."""
    plain = RequestRecord(
        endpoint="/v1/completions",
        request_id="r1",
        arrived_s=100.0,
        request=REQUEST,
        decision=DECISION,
        status=200,
        first_content_s=100.5,
        last_content_s=101.5,
        max_gap_s=0.375,
        output_tokens=11,
        queue_wait_s=0.125,
        ended_s=102.0,
    )
    return dataclasses.replace(plain, **changes)


def line(request_id: str, path: str, reason: str | None, ttft_s: float | None = None, **changes: Any) -> DecisionLine:
    """`predicted={"local": (mean, sd)}`, `met=(ttft, tpot, max_gap)`."""
    predicted = {name: Predicted(*it) for name, it in changes.pop("predicted", {}).items()}
    plain: dict[str, Any] = {
        "at_s": 1_700_000_000.0,
        "request_id": request_id,
        "endpoint": "/v1/completions",
        "stream": True,
        "prompt_tokens": 1000,
        "cached_tokens": {},
        "expected_output_tokens": 50.0,
        "slo": None,
        "path": path,
        "reason": reason,
        "decode": None,
        "prefill": None,
        "predicted": predicted,
        "chance": None,
        "gain": None,
        "terms": {},
        "status": 200,
        "outcome": "ok",
        "rejected_early": False,
        "queue_wait_s": 0.0,
        "ttft_s": ttft_s,
        "tpot_s": None,
        "max_gap_s": None,
        "total_s": None,
        "output_tokens": None,
        "met": ObjectivesMet(*changes.pop("met", (None, None, None))),
    }
    return DecisionLine(**plain | changes)


# Two rejections, one that was lost, and four with a predicted and a measured TTFT: 1, 2, 0.5 and 4 times it.
LINES = (
    line("a", "local", "short_prompt", 0.1, predicted={"local": (0.1, 0.01), "remote_prefill": (0.2, 0.01)},
         met=(True, True, True)),
    line("b", "local", "short_prompt", 0.2, predicted={"local": (0.1, 0.01)}, met=(False, True, True)),
    line("c", "local", "cache_hot", 0.1, predicted={"local": (0.2, 0.01), "remote_prefill": (0.1, 0.05)},
         met=(True, True, None)),
    line("d", "remote_prefill", "prefill_faster", 4.0, predicted={"remote_prefill": (1.0, 0.1), "local": (0.95, 0.1)},
         met=(False, None, None), at_s=1_700_000_060.0),
    line("e", "remote_prefill", "prefill_faster", outcome="lost"),
    line("f", "none", None, status=429, outcome="decode_full", rejected_early=True),
    line("g", "none", None, status=429, outcome="queue_full"),
)  # fmt: skip

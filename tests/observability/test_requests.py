"""A request's record: what is measured of it, its log line, its share of the metrics."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from disagg_router.errors import ErrorCode
from disagg_router.interfaces import Reject
from disagg_router.observability.metrics import Metrics
from disagg_router.observability.requests import REJECTIONS, Met, RequestRecord, RequestRecorder
from tests.observability.records import DECISION, LOCAL, REQUEST, record

REMOTE_PATH = {"path": "remote_prefill"}


def ended(**changes):
    """The metrics after one such request: name and labels -> value."""
    metrics = Metrics()
    recorder = RequestRecorder(metrics)
    recorder.begin("/v1/completions", "r1", 100.0)
    recorder.end(record(**changes), 102.0)
    return lambda name, **labels: metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize(
    ("changes", "ttft_s", "tpot_s", "met"),
    [
        (
            {},
            0.5,
            0.1,
            Met(True, True, False),
        ),  # 1 s for ten tokens after the first; the pause is 0.375 s, 0.25 are good
        ({"first_content_s": 100.75}, 0.75, 0.075, Met(False, True, False)),
        ({"last_content_s": 101.75}, 0.5, 0.125, Met(True, False, False)),
        ({"max_gap_s": 0.25}, 0.5, 0.1, Met(True, True, True)),
        ({"output_tokens": 1, "max_gap_s": None}, 0.5, None, Met(True, None, None)),
        ({"output_tokens": None}, 0.5, None, Met(True, None, False)),
        ({"first_content_s": None, "max_gap_s": None}, None, None, Met()),
        ({"request": None}, 0.5, 0.1, Met()),
    ],
)
def test_what_is_measured(changes, ttft_s, tpot_s, met):
    """TTFT from the arrival, TPOT without the first token, an objective only where there is something to compare."""
    made = record(**changes)
    assert (made.ttft_s, made.tpot_s, made.met) == (ttft_s, tpot_s, met)


def test_the_last_decision_counts():
    """With the request it was made for; waits add up."""
    made = RequestRecord("/v1/completions", "r1", 0.0)
    again = dataclasses.replace(DECISION, path=LOCAL, prefill=None)
    made.decided(DECISION, REQUEST)
    made.queued(0.25)
    made.decided(again)
    made.queued(0.5)
    assert (made.decision, made.request, made.queue_wait_s) == (again, REQUEST, 0.75)


def test_predicted_and_measured_of_the_same_requests():
    """0.25 s predicted, 0.5 s measured: a ratio of 2; another path's prediction is not looked at."""
    value = ended()
    for name, seconds in (("ttft_predicted_seconds", 0.25), ("ttft_seconds", 0.5), ("ttft_error_ratio", 2.0)):
        assert value(f"disagg_{name}_sum", **REMOTE_PATH) == seconds
        assert value(f"disagg_{name}_count", **REMOTE_PATH) == 1
    assert value("disagg_ttft_error_ratio_bucket", path="remote_prefill", le="1.5") == 0
    assert value("disagg_ttft_error_ratio_bucket", path="remote_prefill", le="2.0") == 1
    assert value("disagg_queue_wait_seconds_sum") == 0.125


def test_a_policy_that_predicts_nothing():
    """Only the measured one is counted."""
    value = ended(decision=dataclasses.replace(DECISION, ttft={}))
    assert value("disagg_ttft_seconds_count", **REMOTE_PATH) == 1
    assert value("disagg_ttft_error_ratio_count", **REMOTE_PATH) is None


@pytest.mark.parametrize(
    ("changes", "ttft", "tpot", "max_gap", "good"),
    [
        ({"max_gap_s": 0.2}, "met", "met", "met", "true"),
        ({}, "met", "met", "missed", "false"),
        ({"max_gap_s": 0.2, "outcome": "lost"}, "met", "met", "met", "false"),
        ({"first_content_s": None, "max_gap_s": None}, *["unmeasured"] * 3, "true"),  # not streamed
    ],
)
def test_objectives(changes, ttft, tpot, max_gap, good):
    """Good is what counts for goodput: it succeeded and missed none of what could be measured."""
    labels = {"ttft": ttft, "tpot": tpot, "max_gap": max_gap, "good": good}
    assert ended(**changes)("disagg_objectives_total", path="remote_prefill", **labels) == 1


@pytest.mark.parametrize(
    ("outcome", "early", "rejections", "early_rejections", "not_good"),
    [
        ("decode_full", True, 1, 1, 1),
        ("decode_full", False, 1, None, 1),  # the longest wait was in vain
        ("queue_full", False, 1, None, 1),
        ("bad_request", False, None, None, None),
        ("refused", False, None, None, None),
    ],
)
def test_rejections(outcome, early, rejections, early_rejections, not_good):
    """By code; a request that was none, or that the engine refused, is not the router's rejection."""
    value = ended(decision=None, request=None, first_content_s=None, outcome=outcome, rejected_early=early)
    assert value("disagg_rejections_total", code=outcome) == rejections
    assert value("disagg_early_rejections_total", code=outcome) == early_rejections
    unmeasured = dict.fromkeys(("ttft", "tpot", "max_gap"), "unmeasured")
    assert value("disagg_objectives_total", path="none", good="false", **unmeasured) == not_good
    assert value("disagg_requests_total", path="none", outcome=outcome) == 1
    assert value("disagg_queue_wait_seconds_count") == 0


def test_an_early_rejection_is_told():
    """By admission."""
    made = record()
    made.rejected(Reject(ErrorCode.DECODE_FULL, retry_s=3.0))
    assert made.rejected_early


def test_the_rejections_are_the_codes_of_429_and_503():
    """As the contract lists them."""
    assert {
        "rate_limited", "queue_full", "decode_full", "link_full", "prefill_full",
        "no_decode_instance", "no_prefill_instance", "draining",
    } == REJECTIONS  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, True),
        ({"decision": None, "outcome": "queue_full"}, True),
        ({"decision": None, "outcome": "bad_request"}, False),
    ],
)
def test_who_is_kept(changes, kept):
    """Those about which something was decided, complete."""
    seen = []
    recorder = RequestRecorder(Metrics(), keep=seen.append)
    made = record(ended_s=None, **changes)
    recorder.end(made, 102.0)
    assert seen == ([made] if kept else [])
    assert made.ended_s == 102.0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "path=remote_prefill reason=prefill_faster prefill=p0 decode=d0 predicted_ms=250.0 ttft_ms=500.0"),
        (
            {"decision": None, "first_content_s": None},
            "path=none reason=- prefill=- decode=- predicted_ms=- ttft_ms=-",
        ),
    ],
)
def test_the_log_line(caplog, changes, told):
    """One per request, predicted beside measured."""
    caplog.set_level(logging.INFO, logger="disagg_router.request")
    RequestRecorder(Metrics()).end(record(**changes), 102.0)
    assert caplog.messages == [f"r1 /v1/completions status=200 outcome=ok {told} total_ms=2000.0 bytes=0"]

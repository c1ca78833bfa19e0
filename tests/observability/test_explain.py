"""The summary of a decision log, against figures worked out by hand."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from disagg_router.errors import ConfigError
from disagg_router.observability.explain import (
    Accuracy,
    Attainment,
    DecisionCount,
    OtherArm,
    Rejection,
    read_decisions,
    summarise,
)
from tests.observability.records import LINES, line

SUMMARY = summarise(LINES)
LOCAL, REMOTE, NONE = "local", "remote_prefill", "none"


def test_which_paths_and_why():
    """Counts and shares of path and reason."""
    assert (SUMMARY.requests, SUMMARY.first_at_s, SUMMARY.last_at_s) == (7, 1_700_000_000, 1_700_000_060)
    assert SUMMARY.decisions == [
        DecisionCount(LOCAL, "short_prompt", 2, 2 / 7),
        DecisionCount(REMOTE, "prefill_faster", 2, 2 / 7),
        DecisionCount(NONE, "none", 2, 2 / 7),
        DecisionCount(LOCAL, "cache_hot", 1, 1 / 7),
    ]


def test_predicted_and_measured_ttft():
    """local: TTFT 0.1, 0.1, 0.2; ratios 0.5, 1, 2, so p90 is at 0.8 between 1 and 2; errors 1, 0 and 0.5."""
    of = {it.path: it for it in SUMMARY.paths}
    assert list(of) == [LOCAL, REMOTE, NONE]
    assert (of[LOCAL].requests, of[LOCAL].share) == (3, 3 / 7)
    assert (of[LOCAL].ttft_p50_s, of[LOCAL].ttft_p99_s) == pytest.approx((0.1, 0.198))
    assert dataclasses.asdict(of[LOCAL])["accuracy"] == pytest.approx(
        {"requests": 3, "ratio_p50": 1.0, "ratio_p90": 1.8, "error_p50": 0.5}
    )
    assert of[REMOTE].accuracy == Accuracy(1, 4.0, 4.0, 0.75)
    assert (of[NONE].ttft_p50_s, of[NONE].accuracy) == (None, None)


def test_attainment():
    """Of what could be measured; `all` of everybody."""
    attained = {it.path: it.attainment for it in SUMMARY.paths}
    assert attained == {
        LOCAL: Attainment(ttft=2 / 3, tpot=1.0, max_gap=1.0, all=2 / 3),
        REMOTE: Attainment(ttft=0.0, tpot=None, max_gap=None, all=0.0),
        NONE: Attainment(ttft=None, tpot=None, max_gap=None, all=0.0),
    }


def test_the_other_arm():
    """a, c and d compared; in c remote was better by 0.1 with an sd of 0.05, in d local by 0.05 with one of 0.1."""
    assert SUMMARY.other_arm == OtherArm(decisions=3, better=1 / 3)


def test_rejections():
    """By code, and how many of them early."""
    assert SUMMARY.rejections == [Rejection("decode_full", 1, 1), Rejection("queue_full", 1, 0)]


def test_the_worst_predictions():
    """Half is as wrong as double; five at most."""
    assert [(it.request_id, it.ratio) for it in SUMMARY.worst] == [("d", 4.0), ("b", 2.0), ("c", 0.5), ("a", 1.0)]
    many = [line(str(i), LOCAL, "short_prompt", 0.1 * i, predicted={LOCAL: (0.1, 0.0)}) for i in range(1, 9)]
    assert [it.request_id for it in summarise(many).worst] == ["8", "7", "6", "5", "4"]


def test_the_histogram():
    """Bins that hold their upper edge."""
    assert {it.up_to: it.requests for it in SUMMARY.ratios if it.requests} == {0.5: 1, 1: 1, 2: 1, 5: 1}
    far = summarise([line("x", LOCAL, "policy", 11.0, predicted={LOCAL: (1.0, 0.0)})])
    assert far.ratios[-1].up_to is None
    assert far.ratios[-1].requests == 1


def test_without_predictions_or_measurements():
    """A policy that predicts nothing, answers that were not streamed, a path that has no end: no figure, no error."""
    summary = summarise([line("x", LOCAL, "policy"), line("y", LOCAL, "policy", 0.1, predicted={LOCAL: (None, None)})])
    assert (summary.paths[0].accuracy, summary.other_arm, summary.worst) == (None, OtherArm(0, None), [])


@pytest.mark.parametrize(
    ("change", "found", "unreadable"),
    [
        (lambda text: text, 7, 0),
        (lambda text: text[:-20], 6, 1),  # the router was killed while it wrote
        (lambda text: b"\n" + text + b"\n\n", 7, 0),
        (lambda text: b"\xff\n{}\n" + text, 7, 2),
        (lambda text: text.replace(b'{"at_s"', b'{"later":1,"at_s"'), 7, 0),
    ],
)
def test_reading(tmp_path, change, found, unreadable):
    """Lines that are broken are counted and left out; fields of a later version are passed over."""
    path = tmp_path / "log"
    path.write_bytes(change(b"".join(msgspec.json.encode(it) + b"\n" for it in LINES)))
    lines, bad = read_decisions(path)
    assert (len(lines), bad) == (found, unreadable)
    assert lines == list(LINES[:found])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read {path}: No such file or directory"),
        (b"", "{path} is empty: serve some requests with the decision log switched on first"),
        (b"\n", "{path} is empty: serve some requests with the decision log switched on first"),
        (b"a: b\nc: d\n", "{path} is no decision log: not one of its 2 lines can be read as one"),
    ],
)
def test_nothing_to_read(tmp_path, content, says):
    """One sentence."""
    path = tmp_path / "log"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as told:
        read_decisions(path)
    assert str(told.value) == says.format(path=path)

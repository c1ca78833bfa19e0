"""Admission: room in KV bytes on both sides and on the link, how long until there is, and what is refused early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagg_router.errors import ErrorCode
from disagg_router.interfaces import Claim, Reject, Reserved, Wait
from disagg_router.model import Decision, Estimate, Path, Reason, Slo
from disagg_router.policies.admission import KvAdmission
from disagg_router.view import StreamLoad, TargetLoad
from tests.builders import request, target, view

MB = 1e6
D0, P0 = target("d0"), target("p0")
LOCAL = Decision(Path.LOCAL, D0, Reason.POLICY)
REMOTE = Decision(Path.REMOTE_PREFILL, D0, Reason.POLICY, P0)
DECODE_FULL, LINK_FULL, PREFILL_FULL = ErrorCode.DECODE_FULL, ErrorCode.LINK_FULL, ErrorCode.PREFILL_FULL
# By the builders' costs a token's KV is 1,000 bytes, so 1,000 prompt tokens and 100 of output claim 1.1 MB; they
# prefill in 0.11 s, and a link moves 1 MB in 1 ms.
ASKED = request(prompt_tokens=1000, output_tokens=100.0, max_output_tokens=400)
IDLE = TargetLoad()


def check(asked=ASKED, decision=LOCAL, d0=IDLE, p0=IDLE, **options) -> Any:
    return KvAdmission(**options).check(asked, decision, view("p0", "d0", pairs="p0>d0", d0=d0, p0=p0))


def about(seconds: float) -> Any:
    return pytest.approx(seconds)


def streams(running: int, to_come_tokens: float = 100.0, **more) -> StreamLoad:
    return StreamLoad(running=running, to_come_tokens=to_come_tokens, **more)


def predicts(decision: Decision, mean_s: float, sd_s: float = 0.0, **more) -> Decision:
    return replace(decision, ttft={decision.path: Estimate(mean_s, sd_s)}, **more)


# --- claims ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decision", "changes", "claim"),
    [
        (LOCAL, {}, Claim(1.1 * MB, 0, 0, 1000, 500_000.0, 0.11)),
        (LOCAL, {"max_output_tokens": 10}, Claim(1.01 * MB, 0, 0, 1000, 500_000.0, 0.11)),
        (LOCAL, {"max_output_tokens": None}, Claim(1.1 * MB, 0, 0, 1000, 500_000.0, 0.11)),
        # 200 on top of 800 cached: 200 * (100 + 800) pairs
        (LOCAL, {"cached_tokens": {D0: 800}}, Claim(1.1 * MB, 0, 0, 200, 180_000.0, 0.03)),
        (REMOTE, {}, Claim(1.1 * MB, 1.0 * MB, 1.0 * MB, 1000, 500_000.0, 0.11)),
        (REMOTE, {"cached_tokens": {D0: 800}}, Claim(1.1 * MB, 1.0 * MB, 0.2 * MB, 1000, 500_000.0, 0.11)),
        (REMOTE, {"cached_tokens": {P0: 800}}, Claim(1.1 * MB, 1.0 * MB, 1.0 * MB, 200, 180_000.0, 0.03)),
        (LOCAL, {"prompt_tokens": None}, Claim(0.1 * MB)),
        (REMOTE, {"prompt_tokens": None}, Claim(0.1 * MB)),
    ],
)
def test_what_a_request_holds(decision, changes, claim):
    """The whole prompt's KV on both sides, only what the decode target lacks on the link, only what is not cached
    to compute."""
    found = check(replace(ASKED, **changes), decision)
    assert isinstance(found, Reserved)
    for name in Claim.__slots__:
        assert getattr(found.claim, name) == about(getattr(claim, name)), name


def test_a_prefill_among_streams_takes_longer():
    """One step of 9 ms, 1 ms for each of four streams, and 0.1 ms for each of 1,000 tokens."""
    found = check(d0=TargetLoad(streams=streams(4), decodes=4))
    assert found.claim.prefill_s == about(0.010 + 0.004 + 0.1)


# --- room -----------------------------------------------------------------------------------------------------------


def full(free_mb: float, of_mb: float = 10.0, **more) -> TargetLoad:
    return TargetLoad(kv_capacity_bytes=of_mb * MB, kv_free_bytes=free_mb * MB, **more)


PINNED_4_S = full(0, prefills_end_s=4.0, pinned_bytes=10 * MB)


@pytest.mark.parametrize(
    ("decision", "d0", "p0", "expected"),
    [
        (LOCAL, full(1.1), full(0), None),
        # 10 MB are held by streams with 100 steps of 10 + 1 * (10 - 1) ms to go, 1.9 s: 1 MB of them frees in a tenth.
        (LOCAL, full(0.1, 10.1, streams=streams(10)), full(0), (DECODE_FULL, 0.19)),
        (REMOTE, full(1.1), full(1.0), None),
        (REMOTE, full(0.1, 10.1, streams=streams(10)), full(10), (DECODE_FULL, 0.19)),
        # Its prefills end in 4 s; 0.9 of the 3 MB that they hold free in a share of it.
        (REMOTE, full(9), full(0.1, prefills_end_s=4.0, pinned_bytes=3 * MB), (PREFILL_FULL, 4.0 * 0.9 / 3)),
        (REMOTE, full(9), full(0.1, out_bytes=9.9 * MB, pinned_bytes=9.9 * MB), (PREFILL_FULL, 0.0009)),
        # With soft roles streams may hold most of it, which no pull ends.
        (REMOTE, full(9), full(0.1, streams=streams(10)), (PREFILL_FULL, 1.9 * 0.9 / 9.9)),
        (REMOTE, full(9), full(0.1, pinned_bytes=0.8 * MB, streams=streams(10)), (PREFILL_FULL, 1.9 * 0.9 / 9.9)),
        # Both are full: it waits for the later one.
        (
            REMOTE,
            full(0.1, 10.1, streams=streams(10)),
            full(0, prefills_end_s=4.0, pinned_bytes=10 * MB),
            (PREFILL_FULL, 0.4),
        ),
        # Nobody streams yet where it would go: a stream like its own takes 100 steps of 10 ms.
        (LOCAL, full(0, 2.2), full(0), (DECODE_FULL, 0.5)),
    ],
)
def test_a_request_waits_for_kv_room(decision, d0, p0, expected):
    """Decode room and, for a handoff, prefill room; with the time until what is missing has drained."""
    found = check(decision=decision, d0=d0, p0=p0)
    if expected is None:
        assert isinstance(found, Reserved)
    else:
        assert isinstance(found, Wait)
        assert (found.code, found.ready_s) == (expected[0], about(expected[1]))


@pytest.mark.parametrize(
    ("out_mb", "in_mb", "waited_s", "expected_s"),
    [
        # 1 GB/s in half of 2 s: 1,000 MB may be in flight with its own 1.
        (999, 0, 0.0, None),
        (1000, 0, 0.0, 0.001),
        (0, 1200, 0.0, 0.201),
        (700, 1200, 0.0, 0.201),
        (700, 0, 0.8, 0.101),
        # Late already: as if 1 s were left, not nothing.
        (499, 0, 5.0, None),
        (600, 0, 5.0, 0.101),
        (0, 0, 5.0, None),
    ],
)
def test_a_transfer_waits_for_the_link(out_mb, in_mb, waited_s, expected_s):
    """What leaves the source and what enters the sink both count, against half of what is left of the objective."""
    asked = replace(ASKED, waited_s=waited_s)
    found = check(asked, REMOTE, d0=TargetLoad(in_bytes=in_mb * MB), p0=TargetLoad(out_bytes=out_mb * MB))
    if expected_s is None:
        assert isinstance(found, Reserved)
    else:
        assert found == Wait(LINK_FULL, about(expected_s))


@pytest.mark.parametrize(
    ("decision", "asked", "d0", "p0"),
    [
        # 100 ms are half of the objective and the transfer alone takes 1 s: over an idle link it goes.
        (REMOTE, replace(ASKED, prompt_tokens=1_000_000, slo=Slo(0.2, 0.1, 0.5)), IDLE, IDLE),
        # Nothing to move, so the link's load is not its business.
        (REMOTE, replace(ASKED, cached_tokens={D0: 1000}), TargetLoad(in_bytes=1e12), IDLE),
        (LOCAL, ASKED, TargetLoad(in_bytes=1e12), IDLE),
        # Nobody has counted it.
        (LOCAL, replace(ASKED, prompt_tokens=None), full(0), IDLE),
        # A prompt above all there is: the engine's own refusal says best what is wrong with it.
        (LOCAL, ASKED, full(0, of_mb=0.9), IDLE),
        (REMOTE, ASKED, full(9), full(0, of_mb=0.9)),
        # The prompt fits the whole target, its expected output does not: it goes when the target is empty.
        (LOCAL, ASKED, full(1.05, of_mb=1.05), IDLE),
    ],
)
def test_what_never_waits(decision, asked, d0, p0):
    """Waiting would have no end, or no sense."""
    assert isinstance(check(asked, decision, d0, p0), Reserved)


def test_room_that_takes_longer_than_the_longest_wait_is_refused_at_once():
    """With the time until it is predicted to be there: nearly all must go, in 100 steps of 9 + 91 * 1 ms."""
    slow = full(0.1, 1.1, streams=streams(91))
    assert check(d0=slow, max_wait_s=20) == Wait(DECODE_FULL, about(10.0))
    assert check(d0=slow, max_wait_s=9) == Reject(DECODE_FULL, about(10.0))


# --- early rejection ------------------------------------------------------------------------------------------------

BUSY = TargetLoad(decodes=4, streams=streams(4))


@pytest.mark.parametrize(
    ("mean_s", "sd_s", "waited_s", "rejected"),
    [
        (1.9, 0.0, 0.0, False),
        (2.1, 0.0, 0.0, False),
        # A chance of 0.1 is 2.2 widths of 0.05 * 2 s away.
        (2.21, 0.0, 0.0, False),
        (2.23, 0.0, 0.0, True),
        (9.0, 0.9, 0.0, True),
        # Known to half of itself is not known.
        (9.0, 5.0, 0.0, False),
        (90.0, 90.0, 0.0, False),
        (90.0, 60.0, 0.0, False),
        # What it has waited is certain.
        (5.0, 2.0, 2.0, False),
        (5.0, 2.0, 2.5, True),
    ],
)
def test_what_cannot_make_it_is_refused(mean_s, sd_s, waited_s, rejected):
    """By the predicted TTFT, when something is in the way; a prediction that is not sure never refuses anybody."""
    asked = replace(ASKED, waited_s=waited_s)
    found = check(asked, predicts(LOCAL, mean_s, sd_s), d0=BUSY._replace(prefills_end_s=3.0, prefills=1))
    assert isinstance(found, Reject if rejected else Reserved)
    if rejected:
        assert found == Reject(PREFILL_FULL, about(max(1.0, mean_s - 2.0)))


@pytest.mark.parametrize(
    ("chance", "reject_below", "rejected"),
    [(0.09, 0.1, True), (0.11, 0.1, False), (0.0, None, False), (0.0, 0.0, False), (0.4, 0.5, True)],
)
def test_the_policys_own_chance_counts_before_the_ttft(chance, reject_below, rejected):
    """It knows of the other objectives too."""
    decision = predicts(LOCAL, 0.2, 0.01, chance=chance)
    assert isinstance(check(decision=decision, d0=BUSY, reject_below=reject_below), Reject if rejected else Reserved)


def test_without_a_prediction_nothing_is_refused_early():
    """However much is in the way."""
    assert isinstance(check(d0=BUSY._replace(prefills_end_s=99.0, prefills=9)), Reserved)


@pytest.mark.parametrize(
    ("decision", "d0", "p0", "code", "retry_s"),
    [
        (REMOTE, BUSY, TargetLoad(prefills=1, prefills_end_s=3.0), PREFILL_FULL, 2.5),
        (REMOTE, BUSY._replace(in_bytes=900 * MB), TargetLoad(prefills=1, prefills_end_s=0.8), LINK_FULL, 2.5),
        (LOCAL, BUSY, TargetLoad(prefills=1, prefills_end_s=3.0), DECODE_FULL, 2.5),
        # 91 streams make the step 100 ms, which is the objective; 191 make it 200 ms, 10 s late over 100 tokens.
        (REMOTE, BUSY._replace(streams=streams(191)), TargetLoad(prefills=1, prefills_end_s=3.0), DECODE_FULL, 2.5),
        # There is no room for 6 s: until then no try is worth it.
        (LOCAL, full(0.1, 1.1, streams=streams(51)), IDLE, DECODE_FULL, 6.0),
    ],
)
def test_a_refusal_names_what_is_in_the_way(decision, d0, p0, code, retry_s):
    """The largest of the prefills queued, the bytes in flight, and what the streams cost it."""
    found = check(decision=predicts(decision, 4.5, chance=0.01), d0=d0, p0=p0)
    assert found == Reject(code, about(retry_s))


def test_a_retry_is_never_sooner_than_a_second():
    """Also when only a later objective is lost: then it is what the streams cost it, 5 s over its 100 tokens and
    0.141 s beside its prefill."""
    found = check(decision=predicts(LOCAL, 0.2, chance=0.01), d0=BUSY)
    assert found == Reject(DECODE_FULL, 1.0)
    found = check(decision=predicts(LOCAL, 0.2, chance=0.01), d0=BUSY._replace(streams=streams(141)))
    assert found.retry_s == about(5.141)


LONG = replace(ASKED, prompt_tokens=100_000)  # 10 s to prefill, five times its objective


@pytest.mark.parametrize(
    ("asked", "decision", "d0", "p0", "rejected"),
    [
        # Everything is idle.
        (LONG, LOCAL, IDLE, IDLE, False),
        (LONG, REMOTE, IDLE, IDLE, False),
        (replace(ASKED, waited_s=9.0), LOCAL, IDLE, BUSY, False),
        # Streams run, but what is late about it is its own length.
        (LONG, LOCAL, BUSY, IDLE, False),
        (LONG, REMOTE, BUSY, BUSY, False),
        # It would be in time, were it not for the streams.
        (ASKED, LOCAL, BUSY, IDLE, True),
        (ASKED, REMOTE, IDLE, BUSY, True),
        (ASKED, LOCAL, TargetLoad(foreign=1), IDLE, True),
        # Nor for its length behind others: it would be late without them.
        (LONG, LOCAL, BUSY._replace(prefills=1, prefills_end_s=1.0), IDLE, False),
        (LONG, REMOTE, IDLE, TargetLoad(prefills=1, prefills_end_s=1.0), False),
        (LONG, REMOTE, TargetLoad(in_bytes=MB), IDLE, False),
        # Or for a TPOT that no idle target keeps.
        (replace(ASKED, slo=replace(ASKED.slo, tpot_s=0.001)), LOCAL, BUSY, IDLE, False),
    ],
)
def test_nobody_is_refused_for_what_idle_targets_would_not_do_either(asked, decision, d0, p0, rejected):
    """It is served however late it will be: no later try would be better."""
    found = check(asked, predicts(decision, 12.0, 0.6), d0, p0)
    assert isinstance(found, Reject if rejected else (Reserved, Wait))

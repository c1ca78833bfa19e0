"""Leases: counted per target and kind, released exactly once, reconciled with what engines say."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from disagg_router.interfaces import Claim, EngineLoad, PrefillWork
from disagg_router.model import Slo, Target
from disagg_router.routing.leases import HandoffLease, Held, Lease, LeaseBook, LeaseKind, PrefillLease
from disagg_router.routing.streams import StreamBook
from disagg_router.routing.target_leases import TargetLeases
from tests.builders import target
from tests.fakes.costs import CLAIM, FixedCosts
from tests.fakes.now import Now

P0, P1, D0, D1 = target("p0"), target("p1"), target("d0"), target("d1")


class Books:
    def __init__(self) -> None:
        self.now, self.costs, self.touched = Now(), FixedCosts(), set[Target]()
        self.streams = StreamBook(self.costs, self.touched)
        self.leases = LeaseBook(costs=self.costs, streams=self.streams, touched=self.touched, now_s=self.now)

    def of(self, one: Target) -> TargetLeases:
        found = self.leases.of(one)
        assert found is not None
        return found


def engine(**changes: Any) -> EngineLoad:
    """Idle, with room for 1,000 tokens: 100,000 bytes at 100 a token."""
    plain: dict[str, Any] = {"running": 0, "waiting": 0, "kv_usage": 0.0, "kv_capacity_tokens": 1000}
    return EngineLoad(**(plain | changes))


# --- taking and releasing ---


def test_each_kind_is_counted_for_its_target():
    """A handoff's KV is the prefill side's, a decode's its own target's."""
    books = Books()
    with books.leases.prefill(P0, CLAIM, observed=True), books.leases.handoff(P0, D0, CLAIM):
        with books.leases.decode(D0, CLAIM, streamed=True), books.leases.decode(D0, CLAIM, streamed=True):
            assert books.leases.held() == {
                (LeaseKind.PREFILL, P0): Held(1, 0.0),
                (LeaseKind.HANDOFF, P0): Held(1, 4000.0),
                (LeaseKind.DECODE, D0): Held(2, 10000.0),
            }
    assert books.leases.held() == {}


def test_releasing_twice_counts_once():
    """A lease given back early and again on the way out."""
    books = Books()
    other = books.leases.decode(D0, CLAIM, streamed=True)
    with books.leases.decode(D0, CLAIM, streamed=True) as lease:
        lease.release()
        lease.release()
        assert books.of(D0).decodes.count == 1
    assert books.of(D0).decodes.count == 1
    other.release()
    assert books.leases.held() == {}


def test_an_exception_releases():
    """Whatever the request dies of; and what failed says nothing of the target's speed."""
    books = Books()
    with pytest.raises(ValueError, match="x"), books.leases.prefill(P0, CLAIM, observed=True):
        raise ValueError("x")
    assert books.leases.held() == {}
    assert books.costs.prefills == []


def test_the_link_is_taken_from_the_answer_to_the_first_byte():
    """Before that the prefill has made nothing to move; its KV is held from the start."""
    books = Books()
    seen = []
    with books.leases.handoff(P0, D0, CLAIM) as handoff:
        seen.append((books.of(P0).pinned.total, books.of(P0).link.outward.total, books.of(D0).link.inward.total))
        handoff.answered()
        handoff.answered()
        seen.append((books.of(P0).pinned.total, books.of(P0).link.outward.total, books.of(D0).link.inward.total))
    handoff.answered()
    seen.append((books.of(P0).pinned.total, books.of(P0).link.outward.total, books.of(D0).link.inward.total))
    assert seen == [(4000.0, 0.0, 0.0), (4000.0, 3000.0, 3000.0), (0.0, 0.0, 0.0)]


def test_ranks_share_their_instances_link():
    """A handoff out of rank 1 is on rank 0's way too, so both loads are other ones now."""
    books = Books()
    ranks = [Target(P0.instance, rank) for rank in (0, 1)]
    with books.leases.decode(ranks[0], CLAIM, streamed=True), books.leases.handoff(ranks[1], D0, CLAIM) as handoff:
        books.touched.clear()
        handoff.answered()
        assert books.of(ranks[0]).link.outward.total == 3000.0
        assert set(ranks) <= books.touched


def test_a_prefill_tells_the_cost_model():
    """1,100 tokens in chunks of 512, less the 2 streams beside it, are 3 steps."""
    books = Books()
    slo = Slo(ttft_s=1.0, tpot_s=0.1, max_gap_s=1.0)
    for _ in range(2):
        books.streams.open(P0, slo, prompt_tokens=50, expected_tokens=9, max_tokens=None, now_s=0.0)
    claim = Claim(decode_kv_bytes=0.0, prefill_tokens=1100, prefill_attention=7.0, prefill_s=1.0)
    lease = books.leases.prefill(P0, claim, observed=True)
    books.now.s = 1.25
    lease.done()
    assert books.costs.prefills == [(P0, PrefillWork(1100, 7.0, 3, 2.0, 100.0), 1.25, 1.25)]


def test_many_requests_leave_nothing_behind():
    """2,000 leases over 4 targets, taken and let go in any order: all counts and all sums are exactly 0."""
    books, rng = Books(), random.Random(1)
    open_leases: list[Lease] = []
    for _ in range(2000):
        books.now.s += rng.random() / 100
        claim = Claim(rng.random() * 1e9, rng.random() * 1e9, rng.random() * 1e9, rng.randrange(99), 1.0, rng.random())
        one, other = rng.sample([P0, P1, D0, D1], 2)
        take = rng.randrange(3)
        if take == 0:
            open_leases.append(books.leases.prefill(one, claim, observed=rng.random() < 0.7))
        elif take == 1:
            open_leases.append(books.leases.handoff(one, other, claim))
        else:
            open_leases.append(books.leases.decode(one, claim, streamed=rng.random() < 0.7))
        while open_leases and rng.random() < 0.5:
            _end(open_leases.pop(rng.randrange(len(open_leases))), rng)
    rng.shuffle(open_leases)
    for lease in open_leases:
        _end(lease, rng)
    assert books.leases.held() == {}
    for one in (P0, P1, D0, D1):
        leases = books.of(one)
        assert leases.idle
        assert (leases.pinned.total, leases.decodes.total, leases.prefills.tokens) == (0.0, 0.0, 0)
        assert (leases.answered, leases.coming, leases.awaited, leases.unseen) == (0, 0, 0, 0)
        assert (leases.link.outward.total, leases.link.inward.total) == (0.0, 0.0)


def _end(lease: Lease, rng: random.Random) -> None:
    if isinstance(lease, PrefillLease) and rng.random() < 0.7:
        lease.done()
    elif isinstance(lease, HandoffLease) and rng.random() < 0.7:
        lease.answered()
    lease.release()
    lease.release()


# --- what the engine says ---


def test_room_is_unknown_until_the_engine_tells():
    """And again when it does not know its capacity."""
    books = Books()
    with books.leases.decode(D0, CLAIM, streamed=True):
        assert books.of(D0).kv_free_bytes == math.inf
        books.leases.reconcile(D0, engine())
        assert books.of(D0).kv_free_bytes == 95_000
        books.leases.reconcile(D0, engine(kv_capacity_tokens=None))
        assert books.of(D0).kv_free_bytes == math.inf


def test_free_is_what_neither_leases_nor_others_take():
    """Of 100,000 bytes a decode has 5,000, a handoff's prompt 4,000, and others use 50,000 - 4,000 - 5,000."""
    books = Books()
    with books.leases.decode(D0, CLAIM, streamed=False), books.leases.handoff(D0, P0, CLAIM):
        books.leases.reconcile(D0, engine(kv_usage=0.5))
        assert books.of(D0).foreign_bytes == 41_000
        assert books.of(D0).kv_free_bytes == 50_000


def test_reserved_room_that_is_not_used_yet_hides_nobody():
    """Reserved 5,000 bytes; the stream has used 30 + 2 tokens of them; the engine says 10,000: 6,800 are others'."""
    books = Books()
    slo = Slo(ttft_s=1.0, tpot_s=0.1, max_gap_s=1.0)
    with books.leases.decode(D0, CLAIM, streamed=True):
        stream = books.streams.open(D0, slo, prompt_tokens=30, expected_tokens=20, max_tokens=20, now_s=0.0)
        stream.count(2, 0.1)
        books.leases.reconcile(D0, engine(running=1, kv_usage=0.1))
        assert books.of(D0).foreign_bytes == pytest.approx(6_800)
        assert books.of(D0).kv_free_bytes == pytest.approx(100_000 - 5_000 - 6_800)


def test_a_decode_that_waits_for_its_prefill_uses_nothing_yet():
    """So what its engine uses is all others', until the prefill has answered."""
    books = Books()
    with books.leases.decode(D0, CLAIM, streamed=True), books.leases.handoff(P0, D0, CLAIM) as handoff:
        books.leases.reconcile(D0, engine(running=1, kv_usage=0.1))
        assert (books.of(D0).foreign, books.of(D0).foreign_bytes) == (1, 10_000)
        handoff.answered()
        books.leases.reconcile(D0, engine(running=1, kv_usage=0.1))
        assert (books.of(D0).foreign, books.of(D0).foreign_bytes) == (0, 5_000)


@pytest.mark.parametrize(
    ("running", "waiting", "foreign"),
    [(0, 0, 0), (2, 0, 0), (2, 1, 1), (5, 4, 7)],
)
def test_requests_beyond_ours_are_others(running: int, waiting: int, foreign: int):
    """Ours are a decode, and a prefill whose decode is elsewhere; never fewer than none."""
    books = Books()
    with books.leases.decode(P0, CLAIM, streamed=True), books.leases.handoff(P0, D0, CLAIM):
        with books.leases.prefill(P0, CLAIM, observed=True):
            books.leases.reconcile(P0, engine(running=running, waiting=waiting))
            assert books.of(P0).foreign == foreign


def test_of_two_looks_the_one_that_shows_less_counts():
    """A request that ends between the engine's look and ours would else be taken for somebody else's."""
    books = Books()
    seen = []
    for load in (engine(), engine(running=1, kv_usage=0.1), engine(running=3, kv_usage=0.4), engine()):
        books.leases.reconcile(D0, load)
        seen.append((books.of(D0).foreign, books.of(D0).foreign_bytes))
    assert seen == [(0, 0), (0, 0), (1, 10_000), (0, 0)]


def test_others_streams_run_beside_a_prefill():
    """2 of them, with 100 tokens each by the KV that they use."""
    books = Books()
    books.leases.reconcile(P0, engine(running=2, kv_usage=0.2))
    assert books.leases.beside(P0) == (2, 200)


def test_a_target_that_is_gone_is_forgotten_when_its_leases_are():
    """Another process under the same name starts as unknown."""
    books = Books()
    lease = books.leases.decode(D0, CLAIM, streamed=True)
    books.leases.reconcile(D0, engine(kv_usage=0.5))
    books.leases.forget(D0)
    assert books.of(D0).kv_free_bytes == math.inf
    assert books.of(D0).foreign_bytes == 0
    lease.release()
    assert books.leases.of(D0) is None

"""Leases: counted per target and kind, released exactly once."""

from __future__ import annotations

import pytest

from disagg_router.model import TargetLoad
from disagg_router.routing.leases import LeaseBook, LeaseKind
from tests.builders import target


def test_each_kind_is_counted_for_its_target():
    """And a target at rest leaves nothing behind."""
    book = LeaseBook()
    with book.take(LeaseKind.PREFILL, target("p0")), book.take(LeaseKind.HANDOFF, target("p0")):
        with book.take(LeaseKind.DECODE, target("d0")), book.take(LeaseKind.DECODE, target("d0")):
            assert book.load(target("p0")) == TargetLoad(prefills=1, handoffs=1, decodes=0)
            assert book.load(target("d0")) == TargetLoad(prefills=0, handoffs=0, decodes=2)
        assert book.load(target("d0")) == TargetLoad()
    assert book.held() == {}


def test_releasing_twice_counts_once():
    """A lease given back early and again on the way out."""
    book = LeaseBook()
    other = book.take(LeaseKind.DECODE, target("d0"))
    with book.take(LeaseKind.DECODE, target("d0")) as lease:
        lease.release()
        lease.release()
        assert book.load(target("d0")).decodes == 1
    assert book.load(target("d0")).decodes == 1
    other.release()
    assert book.held() == {}


def test_an_exception_releases():
    """Whatever the request dies of."""
    book = LeaseBook()
    with pytest.raises(ValueError, match="x"), book.take(LeaseKind.PREFILL, target("p0")):
        raise ValueError("x")
    assert book.held() == {}

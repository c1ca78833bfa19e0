"""Leans and packing: where decode and prefill settle when roles are soft."""

from __future__ import annotations

import dataclasses

import pytest

from disagg_router.model import Slo
from disagg_router.policies.role_balance import PACK, LeanBalancer
from disagg_router.view import Leans, StreamLoad, TargetLoad
from tests.builders import target, view

SLO = Slo(ttft_s=0.5, tpot_s=0.025, max_gap_s=0.1)


def streams(running):
    return StreamLoad(running=running, context_tokens=running * 300.0, to_come_tokens=48.0)


def step(cluster, leans=None):
    return LeanBalancer(SLO).step(cluster, leans or Leans())


def test_a_lean_follows_slowly_and_stays_a_while():
    """A quarter of the way in each step: one step without streams does not undo it."""
    decoding = view("u0", soft=True, u0=TargetLoad(decodes=4, streams=streams(4)))
    leans = Leans()
    for lean in (0.25, 0.4375):
        leans = step(decoding, leans)
        assert leans.lean[target("u0")] == pytest.approx(lean)
    assert step(view("u0", soft=True), leans).lean[target("u0")] == pytest.approx(0.4375 * 0.75)


@pytest.mark.parametrize(("name", "lean"), [("p0", -1.0), ("d0", 1.0), ("u0", 0.0)])
def test_an_idle_target_leans_to_its_configured_role(name, lean):
    """From the first step on."""
    assert step(view(name, soft=True)).lean[target(name)] == pytest.approx(lean)


@pytest.mark.parametrize(
    ("load", "kv_bytes_per_s", "packs"),
    [
        (TargetLoad(streams=streams(4)), 0.0, False),  # a step of 13 ms, nothing in its way
        (TargetLoad(streams=streams(4), prefill_share=0.5), 0.0, True),  # 13 ms / (1 - 0.5) = 26 ms
        (TargetLoad(streams=streams(4), prefill_share=0.5), 1.9e9, False),  # 95 % of both links
        # A stall in two seconds, and 96 tokens take 1.4 s: half of the streams would meet one.
        (TargetLoad(streams=streams(4), prefill_share=0.1, stalls_per_s=0.5), 0.0, True),
        (TargetLoad(streams=streams(2), prefill_share=0.1, stalls_per_s=0.01), 0.0, False),
    ],
)
def test_decode_is_packed_when_spreading_would_break_it_and_the_links_can_carry_it(load, kv_bytes_per_s, packs):
    """Two targets, 25 ms per token and pauses of 0.1 s allowed; the builders' links move 1 GB/s each."""
    cluster = dataclasses.replace(view("u0", "u1", soft=True, u0=load, u1=load), kv_bytes_per_s=kv_bytes_per_s)
    assert step(cluster).pack == pytest.approx(PACK if packs else 0.0, abs=0.1 * PACK)


def test_a_lone_target_is_not_packed():
    """There is nothing to choose."""
    assert step(view("u0", soft=True, u0=TargetLoad(streams=streams(9), prefill_share=0.9))).pack == 0

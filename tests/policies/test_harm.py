"""Expected objectives lost and kept."""

from __future__ import annotations

import math

import pytest

from disagg_router.model import Slo
from disagg_router.policies.forecast import decode_terms, prefill_terms
from disagg_router.policies.harm import (
    chance_below,
    later_tokens_chance,
    logistic,
    lost_to_decode,
    lost_to_prefill,
    pause_price,
    start_chance,
)
from disagg_router.view import StreamLoad, TargetLoad
from tests.builders import request, view

SLO = Slo(ttft_s=0.5, tpot_s=0.025, max_gap_s=0.1)


def asked(**changes):
    return request(**{"slo": SLO, "prompt_tokens": 1000, "output_tokens": 96.0, **changes})


def prefill(load, **changes):
    cluster = view("u0", u0=load)
    return prefill_terms(asked(**changes), cluster, cluster.targets[0])


def decode(load, **changes):
    cluster = view("u0", u0=load)
    return decode_terms(asked(**changes), cluster, cluster.targets[0])


def streams(slack=(0,) * 8, unbroken=0):
    return StreamLoad(running=4, context_tokens=400.0, to_come_tokens=48.0, slack=slack, unbroken=unbroken, gap_s=0.1)


@pytest.mark.parametrize(("x", "y"), [(0.0, 0.5), (math.log(3), 0.75), (-1000.0, 0.0), (1000.0, 1.0)])
def test_logistic(x, y):
    """1 / (1 + exp(-x)), also far out."""
    assert logistic(x) == pytest.approx(y)


@pytest.mark.parametrize(
    ("mean_s", "sd_s", "chance"),
    [
        (1.0, 0.0, 0.5),
        (0.95, 0.0, 1 / (1 + math.exp(-1))),  # one width of 5 % below the limit
        (1.2, 0.0, 1 / (1 + math.exp(4))),
        (2.0, 2.0, 0.29),  # a normal of that mean and deviation is below 1 with 0.31
        (0.0, 0.0, 1.0),
    ],
)
def test_a_chance_is_as_wide_as_what_is_not_known(mean_s, sd_s, chance):
    """Of staying below 1 s."""
    assert chance_below(1.0, mean_s, sd_s) == pytest.approx(chance, abs=0.01)


def test_a_pause_longer_than_allowed_breaks_whom_it_meets():
    """1,000 tokens among four streams are a pause of 114 ms; 100 are allowed. Who is broken has nothing to lose."""
    chance = 1 / (1 + math.exp(14 / 5))
    found = lost_to_prefill(asked(), prefill(TargetLoad(streams=streams(unbroken=3))))
    assert found == pytest.approx(3 * (1 - chance))
    assert lost_to_prefill(asked(), prefill(TargetLoad(streams=streams()))) == 0


def test_a_stall_longer_than_their_slack_costs_streams_their_tpot():
    """They are delayed by 101 ms; half of a bin of 0.1 to 0.25 s is 0.175 s, and a budget of 96 tokens has a width of
    0.24 s and 5 ms."""
    width_s = 0.1 * 0.025 * 96 + 0.005
    lost = 4 * (logistic(0.175 / width_s) - logistic((0.175 - 0.101) / width_s))
    found = lost_to_prefill(asked(), prefill(TargetLoad(streams=streams(slack=(0, 0, 0, 4, 0, 0, 0, 0)))))
    assert found == pytest.approx(lost)


def test_no_more_streams_are_lost_than_there_are():
    """However many objectives each of them has."""
    tight = streams(slack=(0, 4, 0, 0, 0, 0, 0, 0), unbroken=4)
    assert lost_to_prefill(asked(prompt_tokens=8000), prefill(TargetLoad(streams=tight), prompt_tokens=8000)) <= 4


def test_one_more_stream_delays_the_others_by_a_little_each_step():
    """1 ms for each of the 48 tokens that they have to come."""
    width_s = 0.1 * 0.025 * 96 + 0.005
    load = TargetLoad(streams=streams(slack=(0, 0, 4, 0, 0, 0, 0, 0)), decodes=4)
    lost = 4 * (logistic(0.075 / width_s) - logistic((0.075 - 0.048) / width_s))
    assert lost_to_decode(asked(), decode(load)) == pytest.approx(lost)


def test_a_shorter_pause_is_better_even_where_none_is_too_long():
    """100 tokens: 24 of 100 ms, for three streams, squared."""
    found = pause_price(prefill(TargetLoad(streams=streams(unbroken=3)), prompt_tokens=100))
    assert found == pytest.approx(0.01 * 3 * 0.24**2)


@pytest.mark.parametrize(
    ("load", "chance"),
    [
        (TargetLoad(), 1.0),
        (TargetLoad(prefill_share=0.6), 0.5),  # 10 ms / (1 - 0.6) = 25 ms, which is allowed and no more
        (TargetLoad(stalls_per_s=0.5), math.exp(-0.5 * 96 * 0.010)),
        (TargetLoad(decodes=40), 0.0),  # 50 ms a step
    ],
)
def test_the_chance_of_later_tokens(load, chance):
    """What prefills take of the target lengthens its steps, and each that is a stall may meet a stream of 96 tokens."""
    assert later_tokens_chance(asked(), decode(load)) == pytest.approx(chance, abs=0.01)


def test_a_stream_that_starts_in_the_middle_of_a_prefill_has_its_pause_at_once():
    """2,000 tokens to prefill there: steps of 0.21 s, where 0.1 s is allowed."""
    busy = TargetLoad(prefills=1, prefill_tokens=2000, prefills_end_s=0.2)
    assert start_chance(asked(), decode(busy)) < 0.01
    assert start_chance(asked(), decode(TargetLoad())) == 1.0


@pytest.mark.parametrize(
    ("share", "steps_per_s", "tokens", "mean_s", "sd_s"),
    [
        (0.0, 0.0, 100, 0.02, 0.0),
        # Half of each second goes into 5 steps of 100 ms; 25 plain steps, and 5 that count half.
        (0.5, 5.0, 100, 1 / 27.5, 0.08 * (5 / 27.5 / 50) ** 0.5),
        # A stream of four times as many tokens meets them twice as evenly.
        (0.5, 5.0, 400, 1 / 27.5, 0.04 * (5 / 27.5 / 50) ** 0.5),
        # Nothing is left beside the prefills but their own steps and a twentieth.
        (1.0, 5.0, 100, 0.02 / (0.05 + 0.05), (0.95 / 5 - 0.02) * (5 * 0.2 / 50) ** 0.5),
    ],
)
def test_a_streams_time_per_token_among_prefills(share, steps_per_s, tokens, mean_s, sd_s):
    """Where a plain step takes 20 ms."""
    load = TargetLoad(prefill_share=share, prefill_steps_per_s=steps_per_s)
    assert load.token_s(0.02, tokens) == pytest.approx((mean_s, sd_s))

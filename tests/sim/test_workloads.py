"""Workloads: who shares what with whom, when requests arrive, and that one seed always asks for the same."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from disagg_router.errors import ConfigError
from disagg_router.sim.describe import describe, lru_hit_rate
from disagg_router.sim.model import Arrival, Workload
from disagg_router.sim.traces import MAX_BLOCK_IDS
from disagg_router.sim.workloads import Cut, Lengths, Pace, load, mix_shift, synthetic

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the public traces are not beside the clone")
CONVERSATION = ("mooncake_conversation_trace.jsonl", "mooncake")
CODE = ("azure2023_code.csv", "azure")
REASONING = ("servegen_deepseek_r1_30min_sample.csv", "servegen")
SHAREGPT = ("sharegpt_v3_sample_lengths.csv", "sharegpt")
REQ300 = ("sharegpt_req300_rate10_llama_lengths.csv", "lengths")

LENGTHS = "arrival_s,input_tokens,output_tokens\n" + "".join(
    f"{at_s},{prompt},{output}\n"
    for at_s, prompt, output in ((100, 10, 5), (101, 20, 0), (103, 0, 4), (106, 4000, 6), (104, 40, 70), (110, 50, 8))
)
TURNS = """conv,turn,new_prompt_tokens,history_tokens,output_tokens
a,0,100,0,60
a,1,30,160,40
a,2,5,230,0
a,3,10,235,20
b,0,80,0,10
b,1,20,70,5
c,0,64,0,64
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "trace"
    file.write_text(text)
    return file


def shared(trace: tuple[str, str], pace: Pace, requests: int | None = None, seed: int = 1) -> Workload:
    return load(SHARED / trace[0], trace[1], random.Random(seed), cut=Cut(requests), pace=pace).workload


def asked(workload: Workload) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(a.prompt_tokens, a.output_tokens, tuple(a.blocks)) for a in workload.arrivals]


def common(one: Arrival, other: Arrival) -> int:
    """How many blocks two requests have in common from the beginning."""
    return next((i for i, (a, b) in enumerate(zip(one.blocks, other.blocks, strict=False)) if a != b), len(one.blocks))


def test_rows_that_cannot_be_simulated_are_counted(tmp_path):
    """Empty ones always, long ones when a limit is given; the first of the others are at 0 s, in order of time."""
    file = write(tmp_path, LENGTHS)
    loaded = load(file, "lengths", random.Random(1), cut=Cut(max_prompt_tokens=1000))
    assert (loaded.empty_rows, loaded.long_rows) == (2, 1)
    assert [(a.number, a.at_s, a.prompt_tokens) for a in loaded.workload.arrivals] == [
        (0, 0, 10),
        (1, 4, 40),
        (2, 10, 50),
    ]


@pytest.mark.parametrize(
    ("cut", "prompts"),
    [
        (Cut(requests=2), [10, 4000]),
        (Cut(requests=2, skip=1), [40, 4000]),
        (Cut(max_tokens=4005), [10, 40, 50]),
        (Cut(max_tokens=4006), [10, 40, 4000, 50]),
        (Cut(requests=9, max_prompt_tokens=40), [10, 40]),
    ],
)
def test_a_part_of_a_file(tmp_path, cut, prompts):
    """A limit holds before anything is skipped or counted."""
    workload = load(write(tmp_path, LENGTHS), "lengths", random.Random(1), cut=cut).workload
    assert [arrival.prompt_tokens for arrival in workload.arrivals] == prompts


def test_prompt_blocks_are_the_traces_and_answer_blocks_are_nobody_elses(tmp_path):
    """The block in which a prompt ends goes on with its answer, so that it is as new as those after it."""
    rows = ((1030, 600, [7, 8, 9]), (1024, 1, [7, 8]), (1030, 500, [7, 8, 9]), (100, 20, [3]))
    text = "".join(
        f'{{"timestamp": 0, "input_length": {n}, "output_length": {o}, "hash_ids": {ids}}}\n' for n, o, ids in rows
    )
    workload = load(write(tmp_path, text), "mooncake", random.Random(1), pace=Pace(jitter_s=0.0)).workload
    assert workload.block_tokens == 512
    assert [list(arrival.blocks) for arrival in workload.arrivals] == [[7, 8, 10, 11], [7, 8, 12], [7, 8, 13], [14]]


@pytest.mark.parametrize("arrivals", ["poisson", "trace"])
@pytest.mark.parametrize("trace", [CONVERSATION, CODE, REASONING, REQ300])
@needs_shared
def test_a_rate_is_exact_and_changes_nothing_else(trace, arrivals):
    """Twice the rate is half of every time, and the requests are the same ones in the same order."""
    slow, fast = (shared(trace, Pace(rate, arrivals), 300) for rate in (4.0, 8.0))
    assert asked(slow) == asked(fast)
    assert [a.at_s for a in slow.arrivals] == pytest.approx([2 * a.at_s for a in fast.arrivals])
    if arrivals == "poisson":
        assert slow.arrivals[-1].at_s == pytest.approx(300 / 4.0)
    else:
        assert describe(slow).rate_rps == pytest.approx(4.0)


@needs_shared
def test_gaps_of_poisson_arrivals_vary_as_much_as_they_are_long():
    """Their coefficient of variation is 1, within its standard error of about 1 % at 12,031 gaps."""
    workload = shared(CONVERSATION, Pace(4.0))
    gaps_s = [after.at_s - before.at_s for before, after in pairwise(workload.arrivals)]
    mean_s = sum(gaps_s) / len(gaps_s)
    deviation_s = (sum((gap_s - mean_s) ** 2 for gap_s in gaps_s) / len(gaps_s)) ** 0.5
    assert deviation_s / mean_s == pytest.approx(1.0, abs=0.03)


@needs_shared
def test_quantised_times_are_spread_out_unless_told_otherwise():
    """1,180 distinct times of 12,031 requests become as many as requests, each up to 3 s later."""
    quantised = shared(CONVERSATION, Pace(jitter_s=0.0))
    spread_out = shared(CONVERSATION, Pace())
    assert len({arrival.at_s for arrival in quantised.arrivals}) == 1180
    assert len({arrival.at_s for arrival in spread_out.arrivals}) == 12_031
    assert describe(spread_out).span_s == pytest.approx(describe(quantised).span_s, abs=3.0)


@pytest.mark.parametrize("pace", [Pace(), Pace(5.0), Pace(5.0, "trace")])
@needs_shared
def test_one_seed_is_one_workload(pace):
    """To the last bit; another seed moves the arrivals."""
    one, same, other = (shared(CONVERSATION, pace, 200, seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def conversations(folder: Path, pace: Pace) -> list[Arrival]:
    """Of TURNS, by prompt length: a0, a1, a3, b0, b1, c0."""
    loaded = load(write(folder, TURNS), "sharegpt", random.Random(3), pace=pace)
    by_prompt = {arrival.prompt_tokens: arrival for arrival in loaded.workload.arrivals}
    assert loaded.empty_rows == 1
    return [by_prompt[n] for n in (100, 190, 245, 80, 90, 64)]


def test_a_turn_shares_everything_before_it(tmp_path):
    """Prompts and answers of its conversation, over a turn without an answer too; not a history that was cut."""
    a0, a1, a3, b0, b1, c0 = conversations(tmp_path, Pace(0.001))
    assert (common(a0, a1), common(a1, a3)) == (3, 4)  # 160 and 230 tokens in blocks of 64
    assert len(a3.blocks) == 5
    assert common(b0, b1) == 0  # 70 tokens of history are not the 90 that were
    assert not {*a3.blocks} & {*b0.blocks}
    assert not {*b0.blocks, *b1.blocks} & {*c0.blocks}


def test_a_turn_comes_after_the_answer_before_it(tmp_path):
    """30 ms a token and the time to think; at most N / rate seconds after the first."""
    a0, a1, *_ = conversations(tmp_path, Pace(0.001))
    at_once0, at_once1, *_ = conversations(tmp_path, Pace(0.001, think_s=0.0))
    assert a1.at_s > a0.at_s + 60 * 0.03
    assert at_once1.at_s == pytest.approx(at_once0.at_s + 60 * 0.03)


@needs_shared
def test_conversations_keep_their_rate_and_their_requests():
    """At 20 requests a second there are as many in the first half as in the second, as in a run that never began; the
    requests are the same at any rate, and a turn whose conversation began before the run shares nothing with it."""
    slow, fast = (shared(SHAREGPT, Pace(rate), 3000) for rate in (20.0, 100.0))
    assert sorted(a[:2] for a in asked(slow)) == sorted(a[:2] for a in asked(fast))
    assert slow.arrivals[0].at_s >= 0
    assert slow.arrivals[-1].at_s <= 150.0
    assert sum(arrival.at_s < 75.0 for arrival in slow.arrivals) == pytest.approx(1500, abs=100)
    assert describe(fast).shared_fraction < describe(slow).shared_fraction
    assert [arrival.number for arrival in slow.arrivals] == list(range(3000))


def test_made_up_lengths():
    """All alike, or lognormal with the means asked for; the same ones at any rate."""
    fixed = synthetic(Lengths.parse("512:64"), 50, 4.0, random.Random(1))
    assert {a[:2] for a in asked(fixed)} == {(512, 64)}
    assert fixed.arrivals[-1].at_s == pytest.approx(50 / 4.0)
    assert describe(fixed).shared_fraction == 0
    drawn, faster = (synthetic(Lengths(1000, 100, 0.5), 20_000, rate, random.Random(1)) for rate in (1.0, 2.0))
    assert asked(drawn) == asked(faster)
    assert describe(drawn).prompt_tokens.mean == pytest.approx(1000, rel=0.02)
    assert describe(drawn).output_tokens.mean == pytest.approx(100, rel=0.02)
    assert describe(drawn).prompt_tokens.p50 == pytest.approx(1000 * 2.718281828**-0.125, rel=0.02)


def test_a_mix_that_shifts():
    """One workload up to a moment and the other from there on, sharing nothing."""
    first = synthetic(Lengths(20_000, 200), 40, 2.0, random.Random(1))
    second = synthetic(Lengths(300, 800), 30, 10.0, random.Random(2))
    both = mix_shift(first, second, 20.0)
    assert [a.prompt_tokens for a in both.arrivals] == [20_000] * 40 + [300] * 30
    assert both.arrivals[-1].at_s == pytest.approx(23.0)
    assert [a.number for a in both.arrivals] == list(range(70))
    blocks = [block for arrival in both.arrivals for block in arrival.blocks]
    assert len(blocks) == len(set(blocks))
    early = mix_shift(first, second, 10.0).arrivals
    assert {a.prompt_tokens for a in early if a.at_s <= 10.0} == {20_000}
    assert {a.prompt_tokens for a in early if a.at_s > 10.0} == {300}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: load(file, "json", random.Random(1)), r"no trace format 'json': give one of mooncake, azure"),
        (lambda file: load(file, "lengths", random.Random(1), cut=Cut(max_tokens=1)), r"no rows .*2 empty, 4 too long"),
        (lambda file: Pace(0.0), r"a rate must be above 0 requests per second, not 0.0"),
        (lambda file: Lengths.parse("512"), r"lengths '512' must be prompt and answer tokens, as in 512/64"),
        (lambda file: Lengths.parse("0/64"), r"lengths '0/64' must be"),
    ],
)
def test_what_cannot_be_built(tmp_path, make, message):
    """Says what to change."""
    with pytest.raises(ConfigError, match=message):
        make(write(tmp_path, LENGTHS))


@pytest.mark.parametrize("pace", [Pace(), Pace(1.0, "trace")])
def test_conversations_have_no_times_of_their_own(tmp_path, pace):
    """So a rate must be given."""
    with pytest.raises(ConfigError, match=r"has no times: give a rate, and poisson arrivals"):
        load(write(tmp_path, TURNS), "sharegpt", random.Random(1), pace=pace)


def test_too_many_blocks():
    """Block ids stay below 2**31."""
    half = synthetic(Lengths(MAX_BLOCK_IDS // 2, 1), 1, 1.0, random.Random(1), block_tokens=1)
    with pytest.raises(ConfigError, match=r"more than 2147483648 blocks: ask for fewer requests"):
        mix_shift(half, half, 2.0)


@pytest.mark.parametrize(
    ("trace", "requests", "span_s", "rate_rps", "prompt", "output", "shared_fraction"),
    [
        (CONVERSATION, 12_031, 3537, 3.40, (6909, 27_367, 85_400, 12_035), (350, 597, 1118, 343), 0.374),
        (CODE, 8819, 3436, 2.57, (1469, 5188, 7436, 2048), (13, 55, 251, 28), 0.0),
        (REQ300, 300, 29, 10.3, (34, 922, 1608, 224), (268, 510, 767, 278), 0.0),
        (REASONING, 71_428, 1800, 39.7, (270, 895, 11_670, 664), (532, 1500, 4060, 813), 0.0),
    ],
)
@needs_shared
def test_descriptions(trace, requests, span_s, rate_rps, prompt, output, shared_fraction):
    """The table of reference/modelling.md section 1, which was made from the same files with other code."""
    found = describe(shared(trace, Pace(jitter_s=0.0)))
    assert found.requests == requests
    assert found.span_s == pytest.approx(span_s, abs=0.6)
    assert found.rate_rps == pytest.approx(rate_rps, rel=0.005)
    for spread, table in ((found.prompt_tokens, prompt), (found.output_tokens, output)):
        assert (spread.p50, spread.p90, spread.p99, spread.mean) == pytest.approx(table, abs=0.6)
    assert found.shared_fraction == pytest.approx(shared_fraction, abs=0.001)


@pytest.mark.parametrize(("capacity_tokens", "rate"), [(1.0e6, 0.055), (5.1e6, 0.215), (25.6e6, 0.362)])
@needs_shared
def test_hit_rates_of_one_cache(capacity_tokens, rate):
    """The conversation trace's token hit rates in reference/modelling.md section 1, within a point."""
    assert lru_hit_rate(shared(CONVERSATION, Pace(jitter_s=0.0)), capacity_tokens) == pytest.approx(rate, abs=0.01)


def test_a_cache_by_hand():
    """Two blocks of room for three requests of one conversation: the last of a prompt's blocks goes first."""
    blocks = ([1, 2, 3, 90], [1, 2, 4, 91], [5, 92], [1, 2, 93])
    arrivals = [Arrival(i, float(i), 10 * (len(ids) - 1), 10, ids) for i, ids in enumerate(blocks)]
    workload = Workload("by hand", 10, arrivals)
    # The second finds 1 and 2; the third's 5 takes the place of 2; the fourth finds 1.
    assert lru_hit_rate(workload, 20) == pytest.approx((20 + 0 + 10) / 90)
    assert lru_hit_rate(workload, 1000) == pytest.approx((20 + 0 + 20) / 90)

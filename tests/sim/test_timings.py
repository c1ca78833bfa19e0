"""Step times: measured rows come back, and what is between and beyond them is what arithmetic says."""

from __future__ import annotations

import csv
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

from disagg_router.sim.jobs import Timings
from disagg_router.sim.profile_file import Tables, read_tables
from disagg_router.sim.profiles import FOLDER
from disagg_router.sim.timings import DecodeRow, LinearTimings, MixedRow, PrefillRow, StepTables, TableTimings

MEASURED = ("a100-8b-tp1", "a100-70b-tp4", "h100-8b-tp1", "h100-70b-tp4", "h200-8b-tp1", "h200-70b-tp4")
SOURCE = Path(__file__).parents[2].parent / "shared" / "profiles"


def tables_of(name: str) -> StepTables:
    files = {key: Path(f"{key}.csv") for key in ("prefill", "decode", "mixed")}
    return read_tables(Tables(rows=name, **files), FOLDER)


def formula_s(chunks: tuple[tuple[int, int], ...], running: int, context_tokens: float) -> float:
    """An engine that takes 10 ms, 50 us per token of either kind, 2e-9 s per pair attended to by a prompt's token and
    4e-8 s per token of a stream's context."""
    tokens = running + sum(new for new, _ in chunks)
    return 0.01 + 5e-5 * tokens + 2e-9 * sum(n * (n / 2 + h) for n, h in chunks) + 4e-8 * context_tokens


def formula_tables() -> StepTables:
    prompts = [(k, n, 0) for n in (64, 128, 256, 1024, 2048) for k in (1, 2)] + [(1, 512, 0), (1, 4096, 0)]
    cached = [(1, 1024, 1024), (1, 1024, 8192), (1, 4096, 4096)]
    return StepTables(
        [PrefillRow(k, n, h, formula_s(((n, h),) * k, 0, 0)) for k, n, h in prompts + cached],
        [DecodeRow(k, c, formula_s((), k, k * c)) for k in (1, 8, 32) for c in (100, 1000, 10000)],
        [
            MixedRow(n, n, k, c, formula_s(((n, 0),), k, k * c))
            for n, k, c in ((300, 8, 500), (300, 32, 500), (900, 20, 4000))
        ],
    )


@pytest.mark.parametrize(
    ("chunks", "running", "context_tokens"),
    [
        pytest.param((), 1, 100, id="a row"),
        pytest.param((), 20, 60_000, id="between rows"),
        pytest.param((), 32, 2_000_000, id="longer contexts"),
        pytest.param((), 500, 300_000, id="more streams"),
        pytest.param(((1, 0),), 0, 0, id="one token"),
        pytest.param(((700, 0),), 0, 0, id="a prompt"),
        pytest.param(((20_000, 0),), 0, 0, id="a longer prompt"),
        pytest.param(((100, 3000),), 0, 0, id="the end of a prompt"),
        pytest.param(((2000, 5000),), 0, 0, id="the middle of a prompt"),
        pytest.param(((9000, 90_000),), 0, 0, id="beyond both"),
        pytest.param(((300, 0), (500, 2048), (40, 40_000)), 0, 0, id="three prompts"),
        pytest.param(((300, 0),), 32, 16_000, id="a mixed row"),
        pytest.param(((1500, 2500), (70, 0)), 400, 900_000, id="everything"),
    ],
)
def test_an_engine_that_follows_a_formula_is_found_again_everywhere(
    chunks: tuple[tuple[int, int], ...], running: int, context_tokens: float
) -> None:
    """The rows are of this formula only, so anything else would be the interpolation's invention."""
    timings = TableTimings(formula_tables(), host_s=0.003)
    expected_s = 0.003 + formula_s(chunks, running, context_tokens)
    assert timings.step_s(chunks, running, context_tokens) == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize("name", MEASURED)
def test_measured_rows_come_back(name: str) -> None:
    """Exactly, but where a row is raised for time to grow with streams: by 3.2 % at most, 0.2 % on average."""
    tables = tables_of(name)
    timings = TableTimings(tables)
    for row in tables.prefill:
        if row.prompts <= 2:
            chunks = ((row.new_tokens, row.cached_tokens),) * row.prompts
            assert timings.step_s(chunks, 0, 0) == pytest.approx(row.step_s, rel=1e-3), row
    raised = [
        timings.step_s((), row.streams, row.streams * row.context_tokens) / row.step_s - 1 for row in tables.decode
    ]
    assert min(raised) > -1e-9
    assert max(raised) < 0.032
    assert mean(raised) < 0.002


@pytest.mark.parametrize("name", MEASURED)
def test_what_is_composed_is_near_what_was_measured(name: str) -> None:
    """Four and eight prompts in a step, and chunks beside streams, of which no row is stored as it is."""
    tables = tables_of(name)
    timings = TableTimings(tables)
    many = [row for row in tables.prefill if row.prompts > 2]
    off = [timings.step_s(((row.new_tokens, 0),) * row.prompts, 0, 0) / row.step_s - 1 for row in many]
    for row in tables.mixed:
        whole, rest = divmod(row.chunk_tokens, row.prompt_tokens)
        # An average part of a prompt attends to half of what surrounds it.
        part = ((rest, (row.prompt_tokens - rest) // 2),) if rest else ()
        chunks = ((row.prompt_tokens, 0),) * whole + part
        if row.streams:
            off.append(timings.step_s(chunks, row.streams, row.streams * row.context_tokens) / row.step_s - 1)
    print(f"{name}: mean {mean(off):+.2%}, mean absolute {mean(map(abs, off)):.2%}, {min(off):+.2%} to {max(off):+.2%}")
    assert max(map(abs, off)) < 0.035
    assert mean(map(abs, off)) < 0.01


@pytest.mark.parametrize(
    ("chunks", "running", "context_tokens", "step_ms"),
    [
        # The mean of 32 and 64 streams with 2,048 and 4,096 each.
        pytest.param((), 48, 48 * 3072, (18.368 + 20.202 + 20.741 + 24.124) / 4, id="48 streams with 3072 each"),
        # Half-way between 3,584 and 7,680 cached.
        pytest.param(((512, 5632),), 0, 0, (38.175 + 40.128) / 2, id="512 on top of 5632"),
        # 256 and 8 streams is the mixed row of 264 tokens; its attention is that of prompts of 1,024 and 4,096.
        pytest.param(((256, 384),), 8, 8 * 1152, 24.527, id="256 beside 8"),
        # What two prompts of 2,048 take, and 2 x 1,024 for each: no attention is shared.
        pytest.param(((2048, 0), (2048, 0)), 0, 0, 260.264, id="two prompts"),
    ],
)
def test_h100_70b_by_hand(
    chunks: tuple[tuple[int, int], ...], running: int, context_tokens: float, step_ms: float
) -> None:
    """From the rows of aic_vllm_{prefill,decode,mixed}.csv for h100_sxm, 70B, TP4."""
    timings = TableTimings(tables_of("h100-70b-tp4"), host_s=0.006)
    assert timings.step_s(chunks, running, context_tokens) * 1000 == pytest.approx(step_ms + 6, rel=0.01)


def growing(step_s: Callable[[int], float], values: range, fall: float = 1e-9, rise: float = 0.5) -> None:
    """No value's time is below the one before it by more than `fall`, nor above by more than `rise`."""
    for low, high in pairwise(values):
        assert 1 - fall <= step_s(high) / step_s(low) <= 1 + rise, f"from {low} to {high}"


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize(("running", "each"), [(0, 0), (8, 1000), (200, 1000), (400, 500)])
def test_more_tokens_take_longer(name: str, running: int, each: int) -> None:
    """New ones, those before them, and those of the streams' contexts; and nowhere does the time jump."""
    timings: Timings = TableTimings(tables_of(name))
    growing(lambda n: timings.step_s(((n, 0),), running, running * each), range(1, 9000), rise=0.05)
    growing(lambda n: timings.step_s(((n, 5000),), running, running * each), range(1, 9000, 7), rise=0.1)
    growing(lambda h: timings.step_s(((700, h),), running, running * each), range(0, 60_000, 97), rise=0.01)
    if running:
        growing(lambda c: timings.step_s((), running, c), range(0, 1_000_000, 997), rise=0.02)


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("each", [1, 100, 1000, 10_000, 30_000])
@pytest.mark.parametrize("chunk", [0, 8, 512])
def test_more_streams_take_longer(name: str, each: int, chunk: int) -> None:
    """Of one context each; beside a tiny chunk up to the tables' own 0.2 %, where two of them meet."""
    timings = TableTimings(tables_of(name))
    chunks = ((chunk, 0),) if chunk else ()
    growing(lambda k: timings.step_s(chunks, k, k * each), range(1, 600), fall=0.002, rise=0.25)


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("running", [1, 5, 64, 256, 300])
def test_a_chunk_of_nothing_costs_nothing(name: str, running: int) -> None:
    """So a step does not jump where its last prompt token goes."""
    timings = TableTimings(tables_of(name))
    assert timings.step_s(((0, 4000),), running, 20_000) == timings.step_s((), running, 20_000)


# DistServe's published coefficients in milliseconds, OPT-13B, TP1, its own engine.
DISTSERVE = LinearTimings(
    prefill=(18.1025e-3, 0.101912e-3, 2 * 7.12226e-9),
    step=(19.9347e-3, 0.0385070e-3, 6.26936e-7),
    large_step=(7.16619e-3, 0.158311e-3, 5.79800e-7),
    large_from=95,
)


@pytest.mark.parametrize(
    ("chunks", "running", "context_tokens", "step_ms"),
    [
        pytest.param(((512, 0),), 0, 0, 18.1025 + 0.101912 * 512 + 7.12226e-6 * 512**2, id="a prompt of 512"),
        pytest.param(
            ((512, 0), (100, 0)),
            0,
            0,
            18.1025 + 0.101912 * 612 + 7.12226e-6 * (512**2 + 100**2),
            id="two prompts",
        ),
        pytest.param(
            ((512, 512),), 0, 0, 18.1025 + 0.101912 * 512 + 7.12226e-6 * (1024**2 - 512**2), id="second half of one"
        ),
        pytest.param((), 94, 50_000, 19.9347 + 6.26936e-4 * 50_000 + 0.0385070 * 94, id="94 streams"),
        pytest.param((), 95, 50_000, 7.16619 + 5.79800e-4 * 50_000 + 0.158311 * 95, id="95 streams"),
        pytest.param(
            ((512, 0),),
            10,
            6000,
            19.9347 + 6.26936e-4 * 6000 + 0.0385070 * 10 + 0.101912 * 512 + 7.12226e-6 * 512**2,
            id="a prompt beside 10 streams",
        ),
    ],
)
def test_distserve_by_its_formulas(
    chunks: tuple[tuple[int, int], ...], running: int, context_tokens: float, step_ms: float
) -> None:
    """A + B*sum(n) + C*sum(n^2) and A + B*sum(context) + C*batch; mixed: the larger constant."""
    assert DISTSERVE.step_s(chunks, running, context_tokens) * 1000 == pytest.approx(step_ms, rel=1e-5)


@pytest.mark.skipif(not SOURCE.is_dir(), reason="the measured tables lie beside the clone")
@pytest.mark.parametrize("kind", ["prefill", "decode", "mixed"])
def test_shipped_rows_are_the_measured_ones(kind: str) -> None:
    """Every row of the six profiles, in order, and no other."""
    sizes = {("Meta-Llama-3.1-8B", "1"): "8b-tp1", ("Meta-Llama-3.1-70B", "4"): "70b-tp4"}
    expected = []
    for row in csv.reader((SOURCE / f"aic_vllm_{kind}.csv").read_text(encoding="utf-8").splitlines()[1:]):
        system, model, tp, *counts, step_ms = row
        if (model, tp) in sizes:
            if kind == "mixed":
                chunk, streams, prompt = counts
                counts = [chunk, prompt, streams, str(int(prompt) + 128)]
            expected.append([f"{system.removesuffix('_sxm')}-{sizes[model, tp]}", *counts, step_ms])
    shipped = list(csv.reader((FOLDER / f"{kind}.csv").read_text(encoding="utf-8").splitlines()[1:]))
    assert shipped == expected

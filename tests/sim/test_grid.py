"""The grid: what is compared, how a search asks for simulations, that nothing is run twice, and wrong use."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from disagg_router.errors import ConfigError
from disagg_router.model import Role
from disagg_router.sim.grid_cells import HARDWARE, Contender, all_cells, baselines, matching, quick_cells
from disagg_router.sim.grid_runs import Result, Runs, Spec, TraceFigures
from disagg_router.sim.grid_search import RATES, Effort, Search

TINY = Effort(10, 20, 1, (10, 20), 1, 30, 2, 0.0, 0.0, every_split=False)
CODE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
SMALL_CODE = next(cell for cell in all_cells() if cell.name == "code/small-8b-h100/1000-15/12GB")


class Scripted:
    """Carries the load up to a rate of its own for each policy, and writes down what it is asked."""

    def __init__(self, carries_rps: dict[str, float]) -> None:
        self._carries_rps, self.asked = carries_rps, list[Spec]()

    async def all(self, specs: list[Spec]) -> list[Result]:
        return [await self.one(spec) for spec in specs]

    async def one(self, spec: Spec) -> Result:
        self.asked.append(spec)
        share = min(1.0, self._carries_rps.get(spec.contender.policy, 1.0) / spec.rate_rps)
        good = round(share * spec.requests)
        return Result("1" * good + "0" * (spec.requests - good), spec.requests / spec.rate_rps, 0, 0, {}, 0.0)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A folder with a code trace of sixty requests."""
    rows = [f"2023-11-16 18:17:{i % 60:02d}.0000000,{400 + 20 * i},20" for i in range(60)]
    (tmp_path / "azure2023_code.csv").write_text("\n".join([CODE_HEADER, *rows]) + "\n")
    return tmp_path


def grid(*words: str, quick: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "disagg_router.sim.grid", *words],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "QUICK": quick},
    )


def test_there_are_48_cells():
    """Each with a name of its own; the quick ones are some of them, every traffic on every hardware."""
    names = [cell.name for cell in all_cells()]
    assert len(set(names)) == len(names) == 48
    quick = quick_cells()
    assert {cell.name for cell in quick} <= set(names)
    assert len({(cell.traffic, cell.hardware) for cell in quick}) == len(quick) == 12


def test_every_split_is_a_baseline():
    """Of eight instances 1 to 7 prefill, for each policy that splits by a rule; of two there is one split."""
    eight, two = (next(c for c in all_cells() if c.hardware.instances == n) for n in (8, 2))
    for policy in ("always_remote", "threshold", "isl_bounding"):
        found = [one for one in baselines(eight, every_split=True) if one.policy == policy]
        assert [one.pools for one in found] == [{Role.PREFILL: k, Role.DECODE: 8 - k} for k in range(1, 8)]
    assert {one.prefill for one in baselines(two, every_split=True)} == {0, 1}
    assert Contender("always_local", 8, chunk_tokens=512) in baselines(eight, every_split=False)


@pytest.mark.parametrize(("pattern", "count"), [(None, 48), ("code", 12), ("70b*1GB", 8), ("nothing", 0)])
def test_cells_by_pattern(pattern, count):
    """Anywhere in the name, with wildcards."""
    assert len(matching(all_cells(), pattern)) == count


def test_the_rate_is_where_the_best_baseline_keeps_nine_tenths():
    """Up to R / 0.9 a baseline that carries R keeps 90 %; the winner of the race sets the rate, within a bisection."""
    runs = Scripted({"always_local": 4.0, "threshold": 9.0})
    effort = Effort(10, 1000, 8, (100, 200), 1, 30, 2, 0.0, 0.0, every_split=True)
    found = asyncio.run(Search(SMALL_CODE, runs, effort, TraceFigures(5000, 28.0)).run())  # type: ignore[arg-type]
    assert found.near_zero_attainment == 1.0
    assert found.knee_rps == pytest.approx(10.0, rel=0.02)
    assert next(iter(found.races[True])).policy == "threshold"


def test_all_contenders_of_a_seed_have_one_workload():
    """And the seeds have different parts of the trace, at every rate."""
    runs = Scripted({"break_even": 5.0, "threshold": 5.0})
    asyncio.run(Search(SMALL_CODE, runs, TINY, TraceFigures(1000, 28.0)).run())  # type: ignore[arg-type]
    finals = [spec for spec in runs.asked if spec.seed]
    seen = {(spec.rate_rps, spec.requests, spec.skip_rows, spec.seed) for spec in finals}
    assert len(seen) == len(RATES) * TINY.seeds
    assert {skip for _, _, skip, _ in seen} == {0, 970}
    assert len(finals) == len(seen) * 3  # break_even, and the best baseline with admission and without


def test_a_run_is_long_enough_for_its_answers():
    """At 50 requests/s, answers of 1,000 tokens at 15 ms a token: four of them one after another take 60 s."""
    runs = Scripted({"always_local": 45.0})
    effort = Effort(10, 20, 8, (10, 20), 1, 30, 2, 2.0, 4.0, every_split=False)
    asyncio.run(Search(SMALL_CODE, runs, effort, TraceFigures(9000, 1000.0)).run())  # type: ignore[arg-type]
    final = next(spec for spec in runs.asked if spec.seed and spec.contender.policy == "break_even")
    assert final.requests / final.rate_rps == pytest.approx(60, rel=0.01)


def test_nothing_is_simulated_twice(traces, tmp_path):
    """What is in the file is taken from it, bit for bit; a last line that was cut off is run again."""
    file = tmp_path / "out" / "grid.jsonl"
    specs = [Spec(SMALL_CODE, Contender(name, 2), 5.0, 30, 0, 1) for name in ("always_local", "break_even")]

    def run(forget: str | None = None) -> tuple[list[Result], int]:
        with Runs(file, traces, 1, lambda: None, forget) as runs:
            return asyncio.run(runs.all(specs)), runs.fresh

    first, fresh = run()
    assert fresh == 2
    assert [len(result.good) for result in first] == [30, 30]
    assert run() == (first, 0)
    file.write_text(file.read_text()[:-10])
    assert run()[1] == 1
    assert run("break_even")[1] == 1
    assert [json.loads(line)["failed"] for line in file.read_text().splitlines()] == [0, 0, 0]


def test_a_file_of_something_else_is_refused(tmp_path):
    """In a sentence that names the line."""
    file = tmp_path / "notes.jsonl"
    file.write_text('{"simulation": "x"}\n')
    with pytest.raises(ConfigError, match=r"notes\.jsonl, line 1 is not of a grid"):
        Runs(file, tmp_path, 1, lambda: None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cells", "b300"), "is in the name of no cell"),
        (("--traces", "/nowhere"), "there is no trace /nowhere/"),
        (("--jobs", "0"), "--jobs"),
    ],
)
def test_wrong_use_is_one_sentence(words, said):
    """And exit code 2."""
    done = grid(*words, quick="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_hardware_is_what_is_shipped():
    """Their profiles have the GPUs that the names say."""
    from disagg_router.sim.profiles import load_profile  # noqa: PLC0415

    assert [load_profile(one.profile).gpus for one in HARDWARE] == [1, 4, 1]

"""Links: each transfer gets the smaller fair share of its two ends, by hand arithmetic."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from disagg_router.sim.links import Links, Transfer
from tests.sim.engines import Bench, virtually

GB = 1e9


def ends(*moves: tuple[str, float, float], bytes_per_s: float = GB) -> list[float]:
    """When each of these has arrived: ("a>b", when it begins, bytes)."""

    async def scenario(bench: Bench) -> list[float]:
        found = [math.nan] * len(moves)

        def begin(place: int, ends_: str, moved_bytes: float) -> None:
            source, sink = ends_.split(">")
            bench.links.start(source, sink, moved_bytes, lambda: found.__setitem__(place, bench.loop.time()))

        for place, (ends_, at_s, moved_bytes) in enumerate(moves):
            bench.at(at_s, begin, place, ends_, moved_bytes)
        await asyncio.sleep(1000)
        return found

    return virtually(scenario, bytes_per_s)


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        pytest.param([("a>b", 0, 3 * GB)], [3], id="alone"),
        pytest.param([("a>b", 0, GB), ("c>d", 0, GB)], [1, 1], id="other ends"),
        pytest.param([("a>b", 0, GB), ("b>a", 0, GB)], [1, 1], id="both directions"),
        pytest.param([("a>b", 0, GB), ("a>c", 0, GB)], [2, 2], id="one source"),
        pytest.param([("a>c", 0, GB), ("b>c", 0, GB)], [2, 2], id="one sink"),
        pytest.param([("a>b", 0, GB), ("a>b", 0, GB)], [2, 2], id="one pair"),
        # Half each until 2 s, when the first is done; 2 GB of the second are left, at full speed.
        pytest.param([("a>b", 0, GB), ("a>c", 0, 3 * GB)], [2, 4], id="the other's share comes back"),
        # 1 GB alone until 1 s; then half: 2 s for the second, when 1 GB of the first is left.
        pytest.param([("a>b", 0, 3 * GB), ("c>b", 1, GB)], [4, 3], id="one comes later"),
        # a sends three and b receives two: a third for each of a's, and for c>b the half of b.
        pytest.param(
            [("a>b", 0, GB), ("a>d", 0, GB), ("a>e", 0, GB), ("c>b", 0, GB)], [3, 3, 3, 2], id="the smaller share"
        ),
        pytest.param([("a>b", 5, 0)], [5], id="nothing to move"),
        # Ends of unequal fullness: c>b has b's half although a>b, held back by a, uses a third only.
        pytest.param(
            [("a>b", 0, GB), ("a>d", 0, GB), ("a>e", 0, GB), ("c>b", 0, 4 * GB)], [3, 3, 3, 5.5], id="no more"
        ),
    ],
)
def test_shares(moves: list[tuple[str, float, float]], expected: list[float]):
    """1 GB/s at each end."""
    assert ends(*moves) == pytest.approx(expected, rel=1e-9)


def test_an_ideal_link_takes_no_time():
    """However much, and however many."""
    assert ends(("a>b", 1, 1e15), ("a>b", 1, 1e12), ("a>c", 2, 1.0), bytes_per_s=math.inf) == [1, 1, 2]


def test_who_is_cancelled_leaves_its_share_to_others():
    """Half for 1 s, then whole: 1.5 s for 1 GB. What has ended or is cancelled already is left alone."""

    async def scenario(bench: Bench) -> tuple[float, list[str]]:
        arrived: list[str] = []
        done = asyncio.Event()
        gone = bench.links.start("a", "b", 9 * GB, lambda: arrived.append("gone"))

        def came() -> None:
            arrived.append("other")
            done.set()

        other = bench.links.start("a", "c", GB, came)
        await asyncio.sleep(1.0)
        bench.links.cancel(gone)
        bench.links.cancel(gone)
        await done.wait()
        at_s = bench.loop.time()
        bench.links.cancel(other)
        await asyncio.sleep(100)
        return at_s, arrived

    assert virtually(scenario, GB) == (pytest.approx(1.5), ["other"])


def test_no_answer_before_the_start_returns():
    """Not even where nothing takes time; and whoever hears of one end may begin the next."""

    async def scenario(bench: Bench) -> list[str]:
        seen: list[str] = []

        def next_one() -> None:
            seen.append("first")
            bench.links.start("a", "b", GB, lambda: seen.append("second"))

        bench.links.start("a", "b", GB, next_one)
        seen.append("begun")
        await asyncio.sleep(0.001)
        return seen

    assert virtually(scenario, math.inf) == ["begun", "first", "second"]


class Flow:
    """Random transfers among four instances, some of them cancelled, with what has moved until now."""

    def __init__(self, links: Links, rng: random.Random) -> None:
        self._links, self._rng = links, rng
        self.bytes: dict[str, float] = {}
        self.open: dict[Transfer, None] = {}
        self.ended = self.begun = 0

    def begin(self) -> None:
        source, sink = self._rng.sample(["a", "b", "c", "d"], 2)
        moved_bytes = self._rng.choice([0.0, self._rng.expovariate(1 / GB)])

        def done() -> None:
            del self.open[transfer]
            self.ended += 1
            for end in (f"{source} out", f"{sink} in"):
                self.bytes[end] = self.bytes.get(end, 0.0) + moved_bytes

        transfer = self._links.start(source, sink, moved_bytes, done)
        self.open[transfer] = None
        self.begun += 1

    def cancel_one(self) -> None:
        if self.open:
            transfer = self._rng.choice(list(self.open))
            del self.open[transfer]
            self._links.cancel(transfer)
            self.begun -= 1


def test_no_end_moves_more_than_it_can():
    """500 random transfers, a tenth of them cancelled: all others end, none of an end's bytes faster than its link."""

    async def scenario(bench: Bench) -> Flow:
        rng = random.Random(7)
        flow = Flow(bench.links, rng)
        for _ in range(500):
            await asyncio.sleep(rng.expovariate(2.5))
            flow.begin()
            for end, moved_bytes in flow.bytes.items():
                assert moved_bytes <= bench.loop.time() * GB * (1 + 1e-9), end
            if rng.random() < 0.1:
                flow.cancel_one()
        await asyncio.sleep(10_000)
        return flow

    flow = virtually(scenario, GB)
    assert flow.ended == flow.begun > 400

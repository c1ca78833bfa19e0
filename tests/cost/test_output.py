"""Expected answer lengths: the first guess, what moves it, and what bounds it."""

from __future__ import annotations

import random

import pytest

from disagg_router.cost.output import OutputHistory
from disagg_router.interfaces import OutputPredictor


def history(*answers: tuple[int | None, int]) -> OutputPredictor:
    """Of (max_tokens, tokens of the answer)."""
    made = OutputHistory()
    for allowed, tokens in answers:
        made.observe(allowed, tokens)
    return made


@pytest.mark.parametrize(
    ("answers", "allowed", "expected"),
    [
        pytest.param([], None, 256, id="nothing known"),
        pytest.param([], 16, 16, id="nothing known, short limit"),
        pytest.param([], 4096, 256, id="nothing known, long limit"),
        pytest.param([(100, 25)], 100, 50, id="one answer: sqrt(100 * 25)"),
        pytest.param([(100, 25), (100, 20), (100, 2)], 100, 24, id="(50 + 20 + 2) / 3"),
        pytest.param([(100, 25)], 65, 50, id="65 to 128 share a history"),
        pytest.param([(128, 128)] * 9, 70, 70, id="but none is expected to pass its own limit"),
        pytest.param([(100, 25)], 129, 129, id="129 is in the next one"),
        pytest.param([(100, 25)], None, 256, id="and no limit is one of its own"),
        pytest.param(
            [(None, 2560)], None, 512, id="what is beyond four times the expected is cut off: sqrt(256 * 1024)"
        ),
        pytest.param([(None, 0)], None, 16, id="an empty answer counts as one token: sqrt(256 * 1)"),
        pytest.param([(0, 0)], 0, 1, id="no limit below one token"),
        pytest.param([(2**40, 16)], 2**30, 64, id="absurd limits share the last one"),
    ],
)
def test_expected_tokens(answers: list[tuple[int | None, int]], allowed: int | None, expected: float) -> None:
    """Worked by hand: min(limit, 256), its geometric middle with the first answer, then a decaying mean."""
    assert history(*answers).expect(allowed) == pytest.approx(expected)


@pytest.mark.parametrize("tokens", [4, 40, 400, 4000])
def test_it_converges(tokens: int) -> None:
    """After 40 answers spread by half their length around a mean, the expectation is within 30 % of it."""
    rng = random.Random(1)
    made = history(*((None, max(1, round(rng.gauss(tokens, tokens / 2)))) for _ in range(40)))
    assert made.expect(None) == pytest.approx(tokens, rel=0.3)


def test_it_follows_a_change_of_traffic() -> None:
    """The memory is 50 answers, so 150 new ones leave 5 % of the old."""
    made = history(*[(None, 400)] * 500, *[(None, 50)] * 150)
    assert made.expect(None) == pytest.approx(50 + 350 * (1 - 1 / 50) ** 150)


def test_one_very_long_answer_moves_little() -> None:
    """It counts as four times the expected length: 100 + (400 - 100) / 50."""
    made = history(*[(None, 100)] * 1000, (None, 1_000_000))
    assert made.expect(None) == pytest.approx(106)

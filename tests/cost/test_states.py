"""Pictures of many states: which are made anew, when, and how many at once."""

from __future__ import annotations

from collections.abc import Mapping

from disagg_router.cost.states import AT_ONCE, FRESH_S, MOST, States


def states() -> States[int, list[int], tuple[int, float]]:
    """Each state is a list; its picture is how much is in it, and when it was drawn."""
    return States(list, lambda _, state, now_s: (len(state), now_s))


def fleet(size: int) -> States[int, list[int], tuple[int, float]]:
    made = states()
    for key in range(size):
        made.change(key)
    made.pictures(0.0)
    return made


def drawn_at(pictures: Mapping[int, tuple[int, float]], now_s: float) -> set[int]:
    return {key for key, (_, drawn_s) in pictures.items() if drawn_s == now_s}


def test_what_changed_is_drawn_at_once_and_nothing_else() -> None:
    """However many changed; an earlier mapping stays as it was."""
    made = fleet(100)
    before = made.pictures(0.1)
    for key in range(50):
        made.change(key).append(1)
    after = made.pictures(0.2)
    assert drawn_at(after, 0.2) == set(range(50))
    assert after[0] == (1, 0.2)
    assert before[0] == (0, 0.0)
    assert made.pictures(0.3) is after


def test_what_grew_old_is_drawn_a_few_at_a_time_oldest_first() -> None:
    """A decision must not wait for hundreds of them."""
    made = fleet(100)
    first, second = made.pictures(FRESH_S), made.pictures(FRESH_S + 0.1)
    assert drawn_at(first, FRESH_S) == set(range(AT_ONCE))
    assert drawn_at(second, FRESH_S + 0.1) == set(range(AT_ONCE, 2 * AT_ONCE))
    made.pictures(FRESH_S + 0.2)
    last = made.pictures(FRESH_S + 0.3)
    assert made.pictures(FRESH_S + 0.4) is last


def test_what_is_out_of_date_counts_as_old() -> None:
    """Only until it is drawn again."""
    made = fleet(5)
    made.outdate()
    fresh = made.pictures(0.1)
    assert drawn_at(fresh, 0.1) == set(range(5))
    assert made.pictures(0.2) is fresh


def test_what_is_forgotten_is_gone_and_starts_anew() -> None:
    """Also when it had just changed; forgetting what is not there does nothing."""
    made = fleet(3)
    made.change(1).append(1)
    made.forget([1, 7])
    assert set(made.pictures(0.1)) == set(made) == {0, 2}
    made.change(1)
    assert made.pictures(0.2)[1] == (0, 0.2)


def test_there_is_a_bound() -> None:
    """The oldest give way."""
    made = fleet(MOST + 10)
    assert len(made.pictures(0.1)) == len(list(made)) == MOST
    assert 9 not in made.pictures(0.1)
    assert MOST + 9 in made.pictures(0.1)

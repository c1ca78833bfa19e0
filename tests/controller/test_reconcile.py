"""reconcile as tables: what was, what is seen, what follows."""

from __future__ import annotations

import pytest

from disagg_router.controller.reconcile import Limits, Memory, Record, World, reconcile
from disagg_router.interfaces import Action, Observed, Start, Stop
from disagg_router.model import InstanceId
from tests.controller.support import ADDRESS, spec

LIMITS = Limits(start_limit_s=100)
ID = InstanceId("decode-0")
NOW_S = 1000.0


def seen(incarnation: str, *, running: bool = True, id: str = ID) -> Observed:
    return Observed(InstanceId(id), incarnation, running, ADDRESS)


def current(**changes: object) -> Record:
    fields = {"starts": 1, "incarnation": "decode-0-b-1", "started_s": NOW_S - 10, **changes}
    return Record(**fields)  # type: ignore[arg-type]


def waiting(**changes: object) -> Record:
    return current(**{"incarnation": None, "failures": 1, "retry_at_s": NOW_S - 1, **changes})


def kinds(actions: tuple[Action, ...]) -> list[str]:
    return [f"{type(action).__name__} {action.incarnation}" for action in actions]


@pytest.mark.parametrize(
    ("record", "observed", "expected"),
    [
        (None, [], ["Start decode-0-b-1"]),
        (current(), [seen("decode-0-b-1")], []),
        (current(), [seen("decode-0-b-1", running=False)], ["Stop decode-0-b-1"]),
        (current(), [], []),  # gone: waits for its back-off
        (waiting(), [], ["Start decode-0-b-2"]),
        (waiting(retry_at_s=NOW_S + 1), [], []),
        (waiting(), [seen("decode-0-b-1", running=False)], ["Stop decode-0-b-1"]),  # freed before the next start
        (waiting(), [seen("decode-0-b-1")], ["Stop decode-0-b-1"]),
        (current(), [seen("decode-0-b-1"), seen("decode-0-a-7")], ["Stop decode-0-a-7"]),
        (None, [seen("decode-0-a-7")], ["Stop decode-0-a-7"]),
        (current(), [seen("decode-0-b-1"), seen("x-1", id="decode-9")], ["Stop x-1"]),
        (current(started_s=NOW_S - 101), [seen("decode-0-b-1")], ["Stop decode-0-b-1"]),
        (current(started_s=NOW_S - 101, ready_since_s=NOW_S - 50), [seen("decode-0-b-1")], []),
    ],
)
def test_actions(record: Record | None, observed: list[Observed], expected: list[str]) -> None:
    """Each situation leads to exactly these actions."""
    memory: Memory = {} if record is None else {ID: record}
    plan = reconcile([spec()], World(tuple(observed), (), NOW_S, "b"), memory, LIMITS)
    assert kinds(plan.actions) == expected


@pytest.mark.parametrize(("failures", "backoff_s"), [(0, 1), (1, 2), (2, 4), (5, 32), (6, 60), (2000, 60)])
def test_backoff_doubles_to_its_limit(failures: int, backoff_s: float) -> None:
    """A death after `failures` earlier ones is retried after the doubled wait."""
    plan = reconcile([spec()], World((), (), NOW_S, "b"), {ID: current(failures=failures)}, LIMITS)
    assert plan.memory[ID].retry_at_s == NOW_S + backoff_s


@pytest.mark.parametrize(("ready_for_s", "failures"), [(119, 3), (120, 0)])
def test_being_ready_for_a_while_forgives_failures(ready_for_s: float, failures: int) -> None:
    """After `steady_s` the next death is retried at once again."""
    record = current(failures=3, ready_since_s=NOW_S - ready_for_s)
    world = World((seen("decode-0-b-1"),), {"decode-0-b-1"}, NOW_S, "b")
    assert reconcile([spec()], world, {ID: record}, LIMITS).memory[ID].failures == failures


def test_instances_no_longer_desired_are_forgotten() -> None:
    """What is neither desired nor running leaves no trace."""
    plan = reconcile([], World((), (), NOW_S, "b"), {ID: current()}, LIMITS)
    assert plan.actions == ()
    assert plan.memory == {}


def test_a_started_incarnation_is_remembered() -> None:
    """The plan that starts an incarnation expects it from then on, so that it is not started twice."""
    plan = reconcile([spec()], World((), (), NOW_S, "b"), {}, LIMITS)
    again = reconcile([spec()], World((seen("decode-0-b-1"),), (), NOW_S, "b"), plan.memory, LIMITS)
    assert kinds(plan.actions) == ["Start decode-0-b-1"]
    assert again.actions == ()


def test_same_inputs_same_plan() -> None:
    """reconcile is a function of its arguments."""
    world = World((seen("decode-0-b-1", running=False),), (), NOW_S, "b")
    first, second = (reconcile([spec()], world, {ID: current()}, LIMITS) for _ in range(2))
    assert first == second
    assert isinstance(first.actions[0], Stop)
    assert not any(isinstance(action, Start) for action in first.actions)

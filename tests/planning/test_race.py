"""Candidates that share the time, on a clock that stands still while nothing is searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from autopar.errors import InfeasibleError, TimeLimitError, UsageError
from autopar.planning.race import Allowance, race

LIMIT = 1.2
"""Seconds of the whole race."""


@dataclass(frozen=True)
class Result:
    seconds: float
    interrupted: bool = False
    cut: bool = False
    used_up: bool = False


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("autopar.planning.race.perf_counter", found)
    return found


def run(find: Callable[[int, Allowance], Any], **options: Any) -> Any:
    return race([1, 2, 4, 8], find, Allowance(1.0, LIMIT), **options)


@pytest.mark.parametrize(("takes", "asked"), [(0.5, [LIMIT / 4, 2 * LIMIT / 4]), (9.0, [LIMIT / 4, 2 * LIMIT / 4, LIMIT / 4])])
def test_time_too_short_for_the_first_plan_is_doubled(clock: Clock, takes: float, asked: list[float]) -> None:
    """Each of four candidates takes so long and no less."""
    given: list[tuple[int, float]] = []

    def find(number: int, allowance: Allowance) -> Result:
        given.append((number, allowance.seconds))
        clock.now += min(allowance.seconds, takes)
        if allowance.seconds < takes:
            raise TimeLimitError("no plan was found", "allow more time")
        return Result(1.0)

    if takes < 1:
        found = run(find)
        assert found.seconds == 1.0 and found.cut, "the others had no time"
    else:
        with pytest.raises(TimeLimitError):
            run(find)
    assert [seconds for number, seconds in given if number == 1] == pytest.approx(asked)


def test_effort_too_little_for_the_first_plan_is_doubled_up_to_the_whole(clock: Clock) -> None:
    given = list[float]()

    def find(number: int, allowance: Allowance) -> Result:
        given.append(allowance.effort_share)
        clock.now += 0.001
        raise TimeLimitError("no plan was found with this effort", "allow more work")

    with pytest.raises(TimeLimitError):
        race([1, 2, 4], find, Allowance(1.0, LIMIT))
    assert given == pytest.approx([1 / 3, 2 / 3, 1.0] * 3)


@pytest.mark.parametrize(("stopped", "searches"), [({"cut": True}, 2), ({"used_up": True}, 2), ({}, 1)], ids=str)
@pytest.mark.parametrize("ends", [None, TimeLimitError("no plan was found", "allow more time"), KeyboardInterrupt()], ids=repr)
def test_the_best_is_searched_again_with_all_that_is_left(
    clock: Clock, stopped: dict[str, bool], searches: int, ends: BaseException | None
) -> None:
    """Only where its share stopped it; and how the second search ends does not lose the plan."""
    given = list[Allowance]()

    def find(number: int, allowance: Allowance) -> Result:
        given.append(allowance)
        if len(given) > 1 and ends is not None:
            raise ends
        clock.now += 0.3
        return Result(1.0 / len(given), **(stopped if len(given) == 1 else {}))

    found = run(find, is_hopeful=lambda number, best: False)
    assert given == [Allowance(0.25, 0.3), Allowance(1.0, pytest.approx(0.9))][:searches]
    again = searches > 1
    assert found.seconds == (0.5 if again and ends is None else 1.0)
    assert found.interrupted is (again and isinstance(ends, KeyboardInterrupt))
    assert found.cut is (bool(stopped.get("cut")) and ends is not None)


def test_candidates_without_hope_are_left_out_and_what_is_left_is_for_the_best(clock: Clock) -> None:
    given = list[int]()

    def find(number: int, allowance: Allowance) -> Result:
        given.append(number)
        return Result(number / len(given) ** 2, used_up=True)

    found = run(find, is_hopeful=lambda number, best: number < 4 and best.seconds >= 0.5)
    assert given == [1, 2, 2] and found.seconds == pytest.approx(2 / 9) and not found.cut


@pytest.mark.parametrize("best", [1, 2, 8])
def test_leaders_have_the_whole_effort_and_the_others_share_as_much(clock: Clock, best: int) -> None:
    given = list[tuple[int, Allowance]]()

    def find(number: int, allowance: Allowance) -> Result:
        given.append((number, allowance))
        clock.now += 0.1
        return Result(1.0 if number == best else 2.0, used_up=True)

    found = run(find, leaders=2)
    wanted = [(1, 1.0, LIMIT), (2, 1.0, 1.1), (4, 0.5, 1.0 / 2), (8, 0.5, 0.9)]
    again = [(8, 1.0, 0.8)] if best == 8 else []
    assert [(number, one.effort_share, pytest.approx(one.seconds)) for number, one in given] == [*wanted, *again]
    assert found.seconds == 1.0, "leaders have had all of it"


@pytest.mark.parametrize(("cut", "said"), [((1,), True), ((2,), True), ((), False)], ids=str)
def test_a_cut_of_any_search_is_said(clock: Clock, cut: tuple[int, ...], said: bool) -> None:
    """Of the best, unless its second search is not cut; and of others, since they might have become the best."""
    assert run(lambda number, allowance: Result(number, cut=number in cut)).cut is said


def test_candidates_left_out_for_want_of_time_are_a_cut(clock: Clock) -> None:
    def find(number: int, allowance: Allowance) -> Result:
        clock.now += LIMIT
        return Result(1.0)

    assert run(find).cut
    assert not race([1], find, Allowance(1.0, LIMIT)).cut


def test_the_last_candidates_have_the_time_that_others_leave(clock: Clock) -> None:
    given = list[Allowance]()

    def find(number: int, allowance: Allowance) -> Result:
        given.append(allowance)
        clock.now += 0.1
        return Result(1.0)

    run(find, spare=2)
    assert [one.seconds for one in given] == pytest.approx([1.2 / 2, 1.1 / 1, 1.0 / 2, 0.9 / 1])
    assert [one.effort_share for one in given] == [0.25] * 4


@pytest.mark.parametrize("error", [InfeasibleError("large", "allow more"), UsageError("no such axis", "name one")], ids=repr)
def test_an_error_skips_a_candidate_and_is_raised_where_all_have_one(clock: Clock, error: Exception) -> None:
    def find(number: int, allowance: Allowance) -> Result:
        if number != 4:
            raise error
        return Result(4.0)

    assert run(find).seconds == 4.0
    with pytest.raises(type(error)):
        race([1, 2], find, Allowance(1.0, LIMIT))

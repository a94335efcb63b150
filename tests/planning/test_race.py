"""Candidates that share the time, on a clock that stands still while nothing is searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from autopar.errors import InfeasibleError, TimeLimitError, UsageError
from autopar.planning.race import StopRace, race

LIMIT = 1.2
"""Seconds of the whole race."""


@dataclass(frozen=True)
class Result:
    seconds: float
    interrupted: bool = False


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


def run(find: Callable[[int, float], Any], **options: Any) -> Any:
    return race([1, 2, 4, 8], find, LIMIT, **options)


@pytest.mark.parametrize(("takes", "asked"), [(0.5, [LIMIT / 4, 2 * LIMIT / 4]), (9.0, [LIMIT / 4, 2 * LIMIT / 4, LIMIT / 4])])
def test_a_share_too_short_for_the_first_plan_is_doubled(clock: Clock, takes: float, asked: list[float]) -> None:
    """Each of four candidates takes so long and no less."""
    given: list[tuple[int, float]] = []

    def find(number: int, seconds: float) -> Result:
        given.append((number, seconds))
        clock.now += min(seconds, takes)
        if seconds < takes:
            raise TimeLimitError("no plan was found", "allow more time")
        return Result(1.0)

    if takes < 1:
        assert run(find).seconds == 1.0
    else:
        with pytest.raises(TimeLimitError):
            run(find)
    assert [seconds for number, seconds in given if number == 1] == pytest.approx(asked)


@pytest.mark.parametrize(("takes", "asked"), [(0.3, [0.3, 0.9]), (0.1, [0.3])])
@pytest.mark.parametrize("ends", [None, TimeLimitError("no plan was found", "allow more time"), KeyboardInterrupt()], ids=repr)
def test_the_best_is_searched_again_in_the_time_left(clock: Clock, takes: float, asked: list[float], ends: BaseException | None) -> None:
    """Only where its share was too short; and how the second search ends does not lose the plan."""
    given = list[float]()

    def find(number: int, seconds: float) -> Result:
        given.append(seconds)
        if len(given) > 1 and ends is not None:
            raise ends
        clock.now += takes
        return Result(1.0 / len(given))

    found = run(find, enough=lambda: True)
    assert given == pytest.approx(asked)
    again = len(asked) > 1
    assert found.seconds == (0.5 if again and ends is None else 1.0)
    assert found.interrupted is (again and isinstance(ends, KeyboardInterrupt))


@pytest.mark.parametrize("stops", [False, True], ids=["enough", "stopped"])
@pytest.mark.parametrize(("takes", "again"), [((0.4, 0.4), [1]), ((0.4, 0.1), [1]), ((0.1, 0.4), [])], ids=str)
def test_a_race_that_stops_early_gives_its_time_to_the_best(
    clock: Clock, takes: tuple[float, float], again: list[int], stops: bool
) -> None:
    """It stops after two of four candidates, of which the first is the better."""
    given = list[int]()

    def find(number: int, seconds: float) -> Result:
        if number == 4:
            raise StopRace
        clock.now += [*takes, 0.0][len(given)]
        given.append(number)
        return Result(number / len(given))

    found = run(find, enough=lambda: len(given) > 1 and not stops)
    assert given == [1, 2, *again] and found.seconds == pytest.approx(1 / 3 if again else 1.0)


def test_the_last_candidates_have_the_time_that_others_leave(clock: Clock) -> None:
    given = list[float]()

    def find(number: int, seconds: float) -> Result:
        given.append(seconds)
        clock.now += 0.1
        return Result(1.0)

    run(find, spare=2)
    assert given == pytest.approx([1.2 / 2, 1.1 / 1, 1.0 / 2, 0.9 / 1])


@pytest.mark.parametrize("error", [InfeasibleError("large", "allow more"), UsageError("no such axis", "name one")], ids=repr)
def test_an_error_skips_a_candidate_and_is_raised_where_all_have_one(clock: Clock, error: Exception) -> None:
    def find(number: int, seconds: float) -> Result:
        if number != 4:
            raise error
        return Result(4.0)

    assert run(find).seconds == 4.0
    with pytest.raises(type(error)):
        race([1, 2], find, LIMIT)

"""Translated loops do what they do in Python."""

from __future__ import annotations

import copy
import itertools
from typing import NamedTuple

import numpy as np
import pytest

from solvers import compiled
from solvers.arrays import Floats, Ints

pytest.importorskip("llvmlite")
from solvers.machine import loaded


class Both(NamedTuple):
    whole: Ints
    broken: Floats


SIDE = 3


def divided(a: int, b: int) -> tuple[int, float, int]:
    return a // b, a / b, -a >> 1 & 12 | 1


def compared(a: int, x: float, yes: bool) -> tuple[bool, bool, bool, int]:
    found = 0
    found += a < x
    return a <= x and yes, not yes or a == 3, a != x or (x > 2.5 and yes), found


def all_of(a: int, b: int, c: int, d: int) -> tuple[bool, bool]:
    return a > 0 and b > 0 and c > 0 and d > 0, a > 0 or b > 0 or c > 0 or d > 0


def choices(a: int, yes: bool) -> tuple[int, int]:
    one, other = (a, a + 1) if yes else (-a, SIDE)
    one, other = other, one
    return one, other


def loops(values: Ints, end: int) -> tuple[int, int, int]:
    total, last = 0, -1
    for value in values:
        if value == 5:
            continue
        if value > 8:
            break
        total += value
    for step in range(2, end, SIDE):
        last = step
        end = 0
    at = 0
    while True:
        at += 1
        if at * at > total:
            return total, last, at


def emptied(values: Floats, count: int) -> float:
    """Room of its own, slices that are written to, and least and most."""
    room, places = np.empty(count), np.empty(2, dtype=np.int64)
    places[0], places[1] = 1, count
    part = room[places[0] : places[1]]
    for k in range(count):
        room[k] = values[k] * 2
    for k in range(len(part)):
        part[k] -= min(values[k], 1, values[0])
    return max(0, room[count - 1], room[1])


def added(both: Both, factor: float) -> None:
    for k in range(len(both.whole)):
        both.broken[k] = total(both.whole[:k], 1) * factor + both.broken[k]


class Nested(NamedTuple):
    both: Both
    more: int


def nested(one: Nested, factor: float) -> int:
    added(one.both, factor)
    return one.both.whole[0] + one.more


def total(values: Ints, more: int) -> int:
    if len(values) == 0:
        return more
    return values[0] + total(values[1:], more)


def same(function, *arguments):
    """The function gives and writes the same in both forms."""
    given = copy.deepcopy(arguments)
    found, wanted = loaded(function)(*arguments), function(*given)
    for one, other in zip(_parts(found), _parts(wanted), strict=True):
        assert one == other and type(one) is type(other.item() if isinstance(other, np.generic) else other)
    for one, other in zip(_parts(arguments), _parts(given), strict=True):
        assert np.array_equal(one, other)


def _parts(value):
    return [part for one in value for part in _parts(one)] if isinstance(value, tuple) else [value]


def test_as_many_conditions_as_there_are():
    for numbers in itertools.product((0, 1), repeat=4):
        same(all_of, *numbers)


def test_tuples_within_tuples():
    same(nested, Nested(Both(np.arange(4), np.ones(4)), 3), 0.5)


@pytest.mark.parametrize("pair", [(7, 2), (-7, 2), (7, -2), (-7, -2), (6, -3), (0, 5), (2**40, 3)])
def test_arithmetic(pair):
    same(divided, *pair)


@pytest.mark.parametrize("yes", [True, False])
def test_comparisons_and_choices(yes):
    for a in (1, 3, 4):
        for x in (0.5, 3.0, 7.0):
            same(compared, a, x, yes)
        same(choices, a, yes)


@pytest.mark.parametrize("values", [[], [1, 2, 3], [5, 5, 1], [1, 9, 4], [8]])
def test_loops(values):
    same(loops, np.array(values, dtype=np.int64), 12)


def test_room_slices_and_other_functions():
    same(emptied, np.array([0.5, 3.0, -2.0, 4.0]), 4)
    same(added, Both(np.arange(5), np.linspace(0, 1, 5)), 0.25)


def chained(a: int) -> bool:
    return 0 < a < 3


def unlike(a: int) -> int:
    found = 0
    found = a / 2
    return found


def from_the_end(values: Ints) -> int:
    return values[-1]


def of_numpy(values: Ints) -> int:
    return np.sum(values)


def in_a_loop(count: int) -> int:
    for size in range(count):
        room = np.empty(size)
    return len(room)


@pytest.mark.parametrize("function", [chained, unlike, from_the_end, of_numpy, in_a_loop])
def test_what_is_not_known_is_refused(function):
    with pytest.raises(TypeError, match=r"not translated|a value of"):
        loaded(function)


def test_arrays_of_other_kinds_are_refused():
    run = loaded(total)
    assert run(np.arange(4), 0) == 6 and run(np.arange(4)[:0], 2) == 2 and run(np.resize(np.arange(3), 0), 1) == 1
    for values in (np.arange(4.0), np.arange(4, dtype=np.int32), np.arange(8)[::2], np.zeros((2, 2), dtype=np.int64)):
        with pytest.raises(TypeError, match="total: an array of"):
            run(values, 0)


def test_every_loop_of_the_solver_is_translated():
    from solvers import dominance, messages, tables

    loops = [made for made in compiled._made if isinstance(made, compiled.Loop) and made.__module__.startswith("solvers.")]
    assert not compiled.AVAILABLE or {dominance.thinned, messages.pass_both, tables.tighten_table, tables.least_table} <= set(loops)
    assert all(callable(made.translated) for made in loops)

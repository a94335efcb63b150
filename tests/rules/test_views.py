"""Views between random shapes: the common factors are right, by execution and against the definition."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings

from autopar.rules import bind, parse
from autopar.rules.computed_layout import refine
from tests.rules.execution import execute
from tests.rules.test_execution import check_split_equals_whole
from tests.strategies import view_shapes


@settings(max_examples=60)
@given(view_shapes())
def test_views_split_as_their_factors_say(both: tuple[list[int], list[int]]) -> None:
    first, second = both
    values = torch.arange(math.prod(first), dtype=torch.float64).reshape(first)
    check_split_equals_whole(execute("aten.view.default", [values, second]))


@given(view_shapes())
def test_both_sides_hold_the_same_factors_in_the_same_order(both: tuple[list[int], list[int]]) -> None:
    left, right = refine(tuple(both[0]), tuple(both[1]))
    found = bind(f"{' '.join(left)} -> {' '.join(right)}", [tuple(both[0])], [tuple(both[1])])
    flat = [[name for names in term for name in names if name != "_"] for term in (found.inputs[0], found.outputs[0])]
    assert flat[0] == flat[1]
    assert math.prod(both[0]) % math.prod(found.extent.values()) == 0


def test_reading_is_cached() -> None:
    assert parse("m -> m") is parse("m -> m")

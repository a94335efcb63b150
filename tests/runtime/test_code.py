"""Straight-line code: what a segment takes, frees and leaves, and who tells of its errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.instructions.code import Code


def test_a_segment_takes_what_it_reads_and_leaves_what_lives() -> None:
    code = Code(2)
    for place in range(2):
        given = code.read("x", place)
        code.add(f"{code.write('y', place)} = {given} + 1")
    code.free(["x"])
    ranks = [{"x": torch.zeros(1), "other": torch.ones(1)}, {"x": torch.ones(1)}]
    code.segment("forward")(ranks, {}, None)
    assert [sorted(held) for held in ranks] == [["other", "y"], ["y"]]
    assert [held["y"].item() for held in ranks] == [1.0, 2.0]


def test_a_value_is_gone_where_it_is_freed() -> None:
    alive: list[bool] = []
    first = torch.zeros(1)
    seen = weakref.ref(first)

    def look() -> None:
        gc.collect()
        alive.append(seen() is not None)

    code = Code(1)
    code.add(f"{code.write('y')} = {code.read('x')} + 1")
    code.add(f"{code.object(look)}()")
    code.free(["x"])
    code.add(f"{code.object(look)}()")
    values = {"x": first}
    del first
    code.segment("forward")([values], {}, None)
    assert alive == [True, False]


@pytest.mark.parametrize("value", [1, -1, True, None, "a'b", 0.1, float("inf"), float("-inf"), (1, 2), (1, (2, 3)), [1, 2], torch.float32])
def test_what_is_settled_is_there_as_it_was(value: Any) -> None:
    code, found = Code(1), list[Any]()
    code.add(f"{code.object(found.append)}({code.object(value)})")
    code.segment("forward")([{}], {}, None)
    assert found == [value] and type(found[0]) is type(value)


def test_an_error_is_told_by_its_own_statement() -> None:
    def handler(error: Exception, variables: Mapping[str, Any]) -> None:
        raise ValueError(f"{variables[name]} is too large") from error

    def fail(x: Tensor) -> Tensor:
        raise IndexError(x.item())

    code = Code(1)
    name = code.read("x")
    code.add(f"{code.write('y')} = {code.object(abs)}({name})")
    code.add(f"{code.write('z')} = {code.object(fail)}({name})", handler)
    with pytest.raises(ValueError, match="7 is too large"):
        code.segment("forward")([{"x": torch.tensor(7)}], {}, None)


def test_an_error_of_which_nobody_tells_more_is_torchs_own() -> None:
    def handler(error: Exception, variables: Mapping[str, Any]) -> None:
        raise AssertionError("of another statement")

    code = Code(1)
    code.add("pass", handler)
    code.add(f"{code.write('z')} = {code.read('x')}[9]")
    with pytest.raises(IndexError):
        code.segment("forward")([{"x": torch.zeros(3)}], {}, None)

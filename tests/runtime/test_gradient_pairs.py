"""Both gradients of a convolution in one call: where they are found, and that a step has the values of plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.importer import capture
from autopar.runtime.instructions.gradient_pairs import TO_INPUT, TO_WEIGHT, find_gradient_pairs
from autopar.runtime.steps.simulation import simulate
from autopar.schedule import Schedule
from autopar.search import find_plan
from autopar.torch_compat import dispatch_mode
from tests.graphs import machine

ROWS = {"input:x": "S0 R R R", "op:convolution": "S0 R R R", "op:convolution_1": "S0 R R R", "op:convolution_2": "S0 R R R"}
"""Rows of the batch on two ranks."""


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False, dtype=torch.float64)
        self.second = nn.Conv2d(6, 4, 3, padding=2, dilation=2, groups=2, dtype=torch.float64)
        self.third = nn.Conv2d(4, 2, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh()).square().sum()


def images() -> Tensor:
    return torch.randn(4, 4, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def schedule(count: int, pins: Mapping[str, str] | None = None) -> Schedule:
    """The schedule of a plan on ``count`` ranks, with these specs."""
    graph = capture(Convolutions(), (images(),), mode="train").graph
    return find_plan(graph, machine(str(count)), memory_bytes=1 << 40, constraints=pins or {}, effort="low").schedule


def targets(found: Schedule, places: Iterable[int]) -> list[str]:
    return [found.operations[found.instructions[place].of].op.target for place in places]


def test_both_gradients_of_a_convolution_stand_side_by_side() -> None:
    found = schedule(1)
    pairs = find_gradient_pairs(found)
    assert targets(found, pairs) == [TO_INPUT] * 2, "the first convolution reads what asks for no gradient"
    assert targets(found, pairs.values()) == [TO_WEIGHT] * 2
    assert not find_gradient_pairs(found, parts=pairs.values()), "a part of the step that is run by itself begins between them"


def test_a_copy_of_the_weight_is_held_longer_but_at_the_peak() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = capture(Convolutions().float(), (images().float(),), mode="train").graph
    found = find_plan(graph, machine("1"), memory_bytes=1 << 40, effort="low").schedule
    pairs = find_gradient_pairs(found)
    between = [found.instructions[place].kind for first, second in pairs.items() for place in range(first + 1, second)]
    assert between == ["free"]
    assert targets(found, pairs) == [TO_INPUT] and len([op for op in graph.ops if op.target == TO_INPUT]) == 2


def test_a_pair_has_equal_parts() -> None:
    rows = schedule(2, ROWS)
    assert len(find_gradient_pairs(rows)) == 2, "gradients for weights are partial sums"
    apart = schedule(2, {**ROWS, "op:convolution_input_gradient": "R R R R"})
    assert len(find_gradient_pairs(apart)) == 1, "a rank makes the whole gradient for the input, and has part of the input"


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_are_those_of_plain_torch(count: int) -> None:
    model, x = Convolutions(), images()
    found = schedule(count, ROWS if count > 1 else None)
    assert find_gradient_pairs(found)
    held = {**dict(model.named_parameters()), "x": x}
    with counted("convolution_backward") as calls:
        made = simulate(found, {item.tensor: held[item.name].detach() for item in found.graph.inputs})
    assert len(calls) == 3 * count, "one for each convolution on each rank"
    model(x).backward()
    names = [output.name for output, _ in found.outputs]
    for name, value in zip(names, made.outputs, strict=True):
        if name in held:
            torch.testing.assert_close(value, held[name].grad, rtol=1e-12, atol=1e-12)


@contextmanager
def counted(part: str) -> Iterator[list[str]]:
    """The operators called within whose names hold this text."""
    calls = list[str]()

    class Counting(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.extend([str(func)] * (part in str(func)))
            return func(*args, **(kwargs or {}))

    with Counting():
        yield calls


@pytest.mark.parametrize("form", ["eager", "graph"])
def test_each_form_makes_one_call_of_a_pair(form: Any, one_rank: None) -> None:
    model, x = Convolutions(), images()
    plan = autopar.plan(model, (x,), mesh={"dp": 1}, hardware="cpu-cluster", effort="low")
    module = autopar.compile(model, plan, execute=form)
    loss = module(x)
    with counted("convolution_backward") as calls:
        loss.backward()
    assert len(calls) == 3, "one for each convolution"

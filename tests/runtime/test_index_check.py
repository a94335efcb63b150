"""Rows that are not there are told, however the table is split: eager torch raises an IndexError, and zeros would be no answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autopar
from autopar.errors import UsageError
from autopar.runtime.instructions.index_check import OutOfReachError, find_checked, raise_index_errors
from autopar.runtime.steps.simulation import simulate
from autopar.schedule import Schedule
from autopar.search import find_plan
from benchmarks.host import counted_kernels
from tests.graphs import machine, random_schedule
from tests.runtime.models import Example, example
from tests.runtime.test_execution import entering

WORDS, CLASSES, IGNORED = 8, 6, 7


class Lookups(nn.Module):
    """Words in a table, and classes of some weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, 4, dtype=torch.float64), nn.Linear(4, CLASSES, dtype=torch.float64)
        self.register_buffer("weights", torch.arange(1.0, CLASSES + 1, dtype=torch.float64))

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.out(self.words(words)), targets, weight=self.weights, ignore_index=IGNORED)


def lookups() -> Example:
    torch.manual_seed(0)
    return example(Lookups(), (torch.arange(8) % WORDS, torch.arange(8) % CLASSES), "train")


def run(found: Example, schedule: Schedule, **values: Tensor) -> Any:
    given = entering(found)
    return simulate(schedule, {name: values.get(name, tensor) for name, tensor in given.items()}, dropout=False)


def with_one(values: Tensor, number: int) -> Tensor:
    return values.index_fill(0, torch.tensor([5]), number)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("name", "number", "size"), [("words", WORDS, "8 rows"), ("words", -1, "8 rows"), ("targets", -3, "6 classes")])
def test_what_is_not_there_is_told(seed: int, name: str, number: int, size: str) -> None:
    found = lookups()
    schedule = random_schedule(found.captured.graph, machine("2x2"), seed)
    given = with_one(entering(found)[name], number)
    with pytest.raises(IndexError):
        found.model(**{**dict(zip(("words", "targets"), found.case.args, strict=True)), name: given})
    with pytest.raises(UsageError, match=rf"test_index_check.py:\d+: index {number} is out of range, there are {size}") as caught:
        run(found, schedule, **{name: given})
    assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("seed", range(6))
def test_what_the_loss_ignores_is_none_of_the_classes(seed: int) -> None:
    found = lookups()
    schedule = random_schedule(found.captured.graph, machine("2x2"), seed)
    given = with_one(entering(found)["targets"], IGNORED)
    made = run(found, schedule, targets=given)
    place = next(index for index, (output, _) in enumerate(schedule.outputs) if output.kind == "output")
    assert made.outputs[place].item() == pytest.approx(found.model(found.case.args[0], given).item())


def test_a_longer_sequence_than_there_are_positions_is_told() -> None:
    """The plan is made from shapes alone, and no value says so before the program runs."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WORDS, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table(torch.arange(x.shape[1]))

    model = Positions()
    graph = autopar.capture(model.to("meta"), (torch.empty(2, WORDS + 4, 4, dtype=torch.float64, device="meta"),), mode="inference")
    schedule = random_schedule(graph, machine("2"), 0)
    values = {item.tensor: torch.randn(graph.tensors[item.tensor].shape, dtype=torch.float64) for item in graph.inputs}
    with pytest.raises(UsageError, match="index 8 is out of range, there are 8 rows"):
        simulate(schedule, values)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("number", [WORDS, -1])
def test_a_table_of_the_users_own_may_be_a_vector(number: int) -> None:
    """Unsqueezed, as the weights of a loss's classes are."""

    class Biases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(WORDS))

        def forward(self, words: Tensor) -> Tensor:
            return nn.functional.embedding(words, self.bias.unsqueeze(1)).sum()

    words = torch.arange(8)
    module = autopar.compile(Biases(), autopar.plan(Biases(), (words,), mesh="1", hardware="cpu-cluster"))
    assert module(words).item() == 8
    with pytest.raises(OutOfReachError, match=f"index {number} is out of range, there are {WORDS} rows"):
        module(with_one(words, number))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("execute", ["eager", "graph"])
def test_every_form_of_a_program_tells_it(execute: str) -> None:
    model, words = nn.Embedding(WORDS, 4), torch.arange(4)
    module = autopar.compile(model, autopar.plan(model, (words,), mesh="1", mode="inference", hardware="cpu-cluster"), execute=execute)
    with counted_kernels() as kernels:
        assert module(words).shape == (4, 4)
    assert dict(kernels) == {"embedding.default": 1}, "which checks by itself"
    with pytest.raises(UsageError, match=r"out of range, there are 8 rows\nhint: "):
        module(words + WORDS)
    assert module(words).shape == (4, 4)


def test_what_torch_compile_tells_instead_is_not_all() -> None:
    with pytest.raises(OutOfReachError, match=r"model\.py:3: an index is out of range, there are 8 rows"), raise_index_errors():
        try:
            raise RuntimeError("model.py:3: an index is out of range, there are 8 rows")
        except RuntimeError:
            raise TypeError("something else") from None
    with pytest.raises(TypeError, match="something else"), raise_index_errors():
        raise TypeError("something else")


@pytest.mark.parametrize(("spec", "count"), [("R R", 1), ("S0 R", 0)])
def test_a_kernel_checks_what_it_looks_up_in_a_whole_table(spec: str, count: int) -> None:
    graph = autopar.capture(nn.Embedding(WORDS, 4), (torch.arange(4),), mode="inference")
    schedule = find_plan(graph, machine("2"), memory_bytes=1 << 40, constraints={"weight": spec}, effort="low").schedule
    assert len(find_checked(schedule, 1)) == count

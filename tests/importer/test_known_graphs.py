"""Graphs that are not traced again, against a trace: what changed in the model, its call or torch is in the graph all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.importer import Capture, capture, capturing
from autopar.importer.trace.known_graphs import KnownGraphs
from tests.graphs import random_graph
from tests.importer.test_repeats import count_calls, same


class Scaled(torch.autograd.Function):
    """A function of the user's, which autograd calls."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * Scaled.factor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)
        self.scale, self.turned, self.function, self.approximate = 2.0, False, torch.tanh, "none"
        self.own: Callable[[Tensor], Tensor] | None = None
        self.table = torch.arange(8.0)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weights = x.sigmoid() * self.scale
        hidden = self.drop(self.function(self.up(x))) * weights
        hidden = hidden if self.own is None else self.own(hidden)
        hidden = nn.functional.gelu(hidden.flip(0) if self.turned else hidden, approximate=self.approximate)
        return (self.down(hidden) * self.table).square().mean()


class OnAnotherLine(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0


class OnYetAnotherLine(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0


def captured(net: nn.Module, **options: Any) -> Capture:
    x = torch.ones(4, 8, dtype=net.up.weight.dtype, requires_grad=bool(options.pop("differentiated", False)))
    return capture(net, (x,), **options)


def traced(net: nn.Module, **options: Any) -> Capture:
    """What a trace gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "KNOWN", KnownGraphs(0))
        return captured(net, **options)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """An entry for each joint trace, where nothing is known at first."""
    monkeypatch.setattr(capturing, "KNOWN", KnownGraphs(2**24))
    return count_calls(monkeypatch, capturing, "trace")


def test_an_equal_program_is_traced_once_and_has_a_graph_of_its_own(traces: list[object]) -> None:
    first, second = captured(Net()), captured(Net())
    assert len(traces) == 1
    assert same(first.graph, second.graph) and first.graph is not second.graph and first.graph.tensors is not second.graph.tensors
    assert first.graph.groups == second.graph.groups


def test_constants_are_those_of_the_last_capture(traces: list[object]) -> None:
    first, other = captured(Net()), Net()
    other.table = torch.full((8,), 3.0)
    second = captured(other)
    assert len(traces) == 1
    assert same(first.graph, second.graph)
    (one,), (two,) = first.constants.values(), second.constants.values()
    assert one.equal(torch.arange(8.0)) and two.equal(other.table)


def in_double(net: Net) -> None:
    net.double()
    net.table = net.table.double()


def tied(net: Net) -> None:
    net.down.weight = net.up.weight


CHANGES: dict[str, Callable[[Net], object]] = {
    "frozen": lambda net: net.up.weight.requires_grad_(False),
    "tied": tied,
    "in double": in_double,
    "another rate of dropout": lambda net: setattr(net.drop, "p", 0.25),
    "evaluated": lambda net: net.drop.eval(),
    "a number in a stretch without gradients": lambda net: setattr(net, "scale", 3.0),
    "another keyword of an operator": lambda net: setattr(net, "approximate", "tanh"),
    "another operator": lambda net: setattr(net, "function", torch.sin),
    "one more operator": lambda net: setattr(net, "turned", True),
    "another table": lambda net: setattr(net, "table", torch.ones(4, 8)),
    "another bias": lambda net: setattr(net.up, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_traced(traces: list[object], change: str) -> None:
    net = Net()
    before = captured(net).graph
    CHANGES[change](net)
    found = captured(net)
    assert len(traces) == 2
    assert same(found.graph, traced(net).graph) and not same(found.graph, before)


@pytest.mark.parametrize(
    "options", [{"mode": "inference"}, {"compute_dtype": "autocast-bfloat16"}, {"differentiated": True}, {"loss": torch.neg}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_a_change_of_the_call_is_traced(traces: list[object], options: dict[str, Any]) -> None:
    before = captured(Net()).graph
    found = captured(Net(), **options)
    assert len(traces) == 2
    assert same(found.graph, traced(Net(), **options).graph) and not same(found.graph, before)


def test_pinned_weights_are_traced_without_blocks(traces: list[object]) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            one, two = self.up(x).chunk(2, -1)
            return (one * two).mean()

    plain = {"up.weight": frozenset({0, 1}), "up.bias": frozenset({0})}
    graphs = [captured(Halves(), plain=given).graph for given in (None, plain, None, plain)]
    assert len(traces) == 2
    assert [sum(item.blocks is not None for item in graph.inputs) for graph in graphs] == [2, 0, 2, 0]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_another_default_dtype_is_traced(traces: list[object]) -> None:
    net = Net()
    net.own = lambda hidden: hidden + torch.linspace(0, 1, 8).to(hidden.dtype)
    before = captured(net).graph
    with default_dtype(torch.float64):
        found, wanted = captured(net).graph, traced(net).graph
    assert same(found, wanted) and not same(found, before)


def test_operators_name_their_own_lines(traces: list[object]) -> None:
    lines = [captured(kind()).graph.ops[-1].location for kind in (OnAnotherLine, OnYetAnotherLine)]
    nets = OnAnotherLine(), OnYetAnotherLine()
    assert [captured(net).graph.ops[-1].location for net in nets] == lines == [traced(net).graph.ops[-1].location for net in nets]
    assert len({tuple(op.location for op in captured(net).graph.ops) for net in nets}) == 2


def test_functions_that_autograd_calls_are_traced_each_time(traces: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    net.own = Scaled.apply
    before = captured(net).graph
    monkeypatch.setattr(Scaled, "factor", 5.0)
    after = captured(net).graph
    assert len(traces) == 2 and same(after, traced(net).graph) and not same(after, before)


def test_hooks_of_gradients_are_traced_each_time(traces: list[object]) -> None:
    net, factor = Net(), [2.0]
    net.up.weight.register_hook(lambda gradient: gradient * factor[0])
    before = captured(net).graph
    factor[0] = 5.0
    after = captured(net).graph
    assert len(traces) == 2 and same(after, traced(net).graph) and not same(after, before)


def test_operators_of_others_are_traced_each_time(traces: list[object]) -> None:
    with torch.library._scoped_library("known_graphs", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        net = Net()
        net.own = lambda hidden: torch.ops.known_graphs.twice(hidden.detach())
        for _ in range(2):
            captured(net)
    assert len(traces) == 2


@pytest.mark.usefixtures("one_rank")
def test_a_script_that_plans_and_compiles_traces_once(traces: list[object]) -> None:
    net, x = Net(), torch.ones(4, 8)
    module = autopar.compile(net, autopar.plan(net, (x,), mesh="1"))
    assert module(x).isfinite()
    assert len(traces) == 1


def test_the_graphs_used_last_are_kept() -> None:
    graphs = {str(seed): random_graph(seed) for seed in range(4)}
    sizes = KnownGraphs(2**20)
    for key, graph in graphs.items():
        sizes.keep(key, graph)
    room = sum(len(written) for written in sizes._kept.values()) - 1
    known = KnownGraphs(room)
    for key in "012":
        known.keep(key, graphs[key])
    assert known.find("0") == graphs["0"]
    known.keep("3", graphs["3"])
    assert [known.find(key) is not None for key in "0123"] == [True, False, True, True]
    known.keep(None, graphs["1"])
    assert known.find(None) is None and known.find("0") == graphs["0"]
    known.keep("all", random_graph(0, layers=100))
    assert not known._kept, "what alone takes more is not kept"

"""Graphs of a schedule: what stays whole in them, and the code that runs them."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar import zoo
from autopar.runtime.execution.emission import issue
from autopar.torch_compat import assert_later, fake_mode, trace_operators
from autopar.verify.launch import run_ranks
from benchmarks.host import counted_kernels


def compute(x: Tensor, y: Tensor, unused: Tensor) -> list[Tensor]:
    values, places = (x + y).max(1)
    x.clone().mul_(2)
    table = torch.arange(3, device=x.device)
    chosen = values[table]
    return [chosen.softmax(0), places, x, chosen.expand(2, 3).reshape(6), x]


def test_the_code_of_a_graph_does_what_the_graph_does() -> None:
    given = [torch.arange(12.0).view(3, 4).cos(), torch.arange(12.0).view(3, 4).sin(), torch.zeros(1)]
    graph = traced(compute, *given)
    wanted, found = graph(*given), issue(graph)(*given)
    assert len(found) == 5 and all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert found[2] is given[0]


def test_a_value_of_a_graph_is_freed_after_its_last_use() -> None:
    seen, alive = list[Any](), list[int]()

    def look(x: Tensor) -> Tensor:
        alive.append(sum(one() is not None for one in seen))
        seen.append(weakref.ref(x))
        return x

    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    for _ in range(4):
        value = graph.call_function(torch.neg, (graph.call_function(look, (value,)),))
    graph.output([value])
    issue(torch.fx.GraphModule({}, graph))(torch.ones(3))
    assert alive == [0, 1, 1, 1], "of what was seen before, the argument alone, which its caller holds"


def look_up(table: Tensor, numbers: Tensor) -> list[Tensor]:
    assert_later(~(numbers >= table.shape[0]).any(), "out of range")
    return [table[numbers]]


def look_up_drawn(table: Tensor) -> list[Tensor]:
    return look_up(table, torch.randint(2, (2,), device=table.device))


def traced(function: Callable[..., list[Tensor]], *given: Tensor) -> torch.fx.GraphModule:
    with fake_mode() as mode:
        return trace_operators(function, [mode.from_tensor(tensor) for tensor in given], {})


def test_what_a_kernel_checks_is_asserted_when_it_fails() -> None:
    table, numbers = torch.ones(3), torch.tensor([0, 2])
    run = issue(traced(look_up, table, numbers), {"out of range"})
    with counted_kernels() as kernels:
        (found,) = run(table, numbers)
    assert found.tolist() == [1, 1] and dict(kernels) == {"index.Tensor": 1}
    with pytest.raises(RuntimeError, match="out of range"):
        run(table, numbers + 1)
    run = issue(traced(look_up, table, numbers), {"something else"})
    with counted_kernels() as kernels:
        run(table, numbers)
    assert kernels["_assert_async.msg"] == 1


def test_what_is_drawn_is_asserted_at_once() -> None:
    run = issue(traced(look_up_drawn, torch.ones(3)), {"out of range"})
    with counted_kernels() as kernels:
        run(torch.ones(3))
    assert kernels["_assert_async.msg"] == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_by_expert_that_look_at_values_are_whole_in_a_graph(dtype: str) -> None:
    torch.manual_seed(0)
    dispatch = "grouped" if dtype == "float32" else "dense"
    target = zoo.build("moe", dispatch=dispatch, dtype=dtype, batch=2, seq=4, layers=1, width=16, heads=2, hidden=16, experts=4)
    plan = autopar.plan(target.model, target.args, mesh={"dp": 1}, hardware="h100-sxm")

    def rank_main(rank: int) -> tuple[list[float], set[str]]:
        module: Any = autopar.compile(copy.deepcopy(target.model), plan, execute="graph")
        loss = module(*target.args)
        loss.backward()
        graphs = module.step.executable
        nodes = {str(node.target) for graph in (graphs.forward_graph, graphs.backward_graph) for node in graph.graph.nodes}
        norms = [parameter.grad.to_local().norm().item() for parameter in module.parameters()]
        return [loss.item(), *norms], {name for name in nodes if name.startswith("autopar")}

    loss = target.model(*target.args)
    loss.backward()
    wanted = [loss.item(), *(parameter.grad.norm().item() for parameter in target.model.parameters())]
    ((found, whole),) = run_ranks(rank_main, 1)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert whole == ({"autopar.expert_contract.default"} if dispatch == "grouped" else set())


def test_places_of_rows_are_found_in_each_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by expert are taken apart as on a GPU in bfloat16: backward finds where rows end, and which experts there are, anew."""
    monkeypatch.setattr("autopar.runtime.execution.emission.LOOKING", set())
    torch.manual_seed(0)
    target = zoo.build("moe", dispatch="grouped", dtype="bfloat16", batch=2, seq=4, layers=2, width=16, heads=2, hidden=16, experts=4)
    plan = autopar.plan(target.model, target.args, mesh={"dp": 1}, hardware="h100-sxm")

    def rank_main(rank: int) -> list[Counter[str]]:
        module: Any = autopar.compile(copy.deepcopy(target.model), plan, execute="graph")
        graphs = module.step.executable
        both = graphs.forward_graph, graphs.backward_graph
        return [Counter(f"{node.op} {node.target}" for node in graph.graph.nodes) for graph in both]

    (found,) = run_ranks(rank_main, 1)
    for counts in found:
        sorts, searches = (counts[f"call_function aten.{name}"] for name in ("sort.stable", "searchsorted.Tensor"))
        assert sorts == searches == 2, "one for each layer"
        assert not any(name.startswith(("call_function autopar.", "get_attr")) for name in counts)

"""Equal layers are made alike where that costs next to nothing, and left as they are where it would cost more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cli.target import load_target
from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.effort import unlimited
from autopar.importer import capture_graph
from autopar.schedule import Assignment
from autopar.search.choices.pins import resolve_pins
from autopar.search.choices.space import Space
from autopar.search.driver.phase_table import Search
from autopar.search.fixing import tie_layers as alike
from autopar.search.folding.layer_groups import group_layers
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import InSequence
from autopar.search.memory.memory_repair import solve_fixed
from autopar.search.settings import NEAR
from tests.search.requests import asked


def searched() -> Search:
    """A search that has ended, on three equal layers."""
    target = load_target("zoo:gpt2,layers=3,width=64,heads=4,batch=8,seq=32,vocab=128", "train", device="meta")
    graph = capture_graph(target.model, target.args, target.kwargs, mode="train", loss=target.loss, loss_args=target.loss_args)
    machine = Machine(Mesh.parse("dp=2,tp=2"), load_hardware("cpu-cluster"), "communication")
    model = build_model(Space(graph, machine, "adamw", resolve_pins(graph, machine.mesh, {})))
    search = Search(model, asked(2**34, work=1e6, gap=0.05), may_recompute=False)
    search.run()
    return search


def ways(search: Search, assignment: Assignment) -> list[int]:
    """How many ways there are in which the repeats of each group lie."""
    graph = search.model.space.graph
    groups = [group_layers(graph, repeats) for repeats in graph.groups]
    return [len({alike._repeat_choices(group, repeat, assignment) for repeat in range(len(group.repeats))}) for group in groups]


def searched_with_an_odd_layer() -> Search:
    """The same search, whose incumbent now splits one weight of one layer in another way."""
    search = searched()
    assert search.best is not None
    problem, _ = search.model.problem(search.limit, InSequence())
    weight = next(item.tensor for item in search.model.space.graph.inputs if item.name == "layers.1.up.weight")
    for spec in search.model.nodes[search.model.node_number["input", weight]].specs:
        wanted = replace(search.best.assignment, inputs={**search.best.assignment.inputs, weight: spec}, strategies={})
        choices = solve_fixed(search.model, problem, wanted, 0, unlimited())
        if spec != search.best.assignment.inputs[weight] and choices is not None:
            break
    search.incumbent.plan = search.schedule(decode_assignment(search.model, choices), None, 0)
    return search


def test_odd_layer_takes_the_sharding_of_the_others() -> None:
    search = searched_with_an_odd_layer()
    odd = search.best
    assert odd is not None and max(ways(search, odd.assignment)) > 1
    found = alike.tie_equal_layers(search)
    assert found is not None and found.assignment != odd.assignment and found.seconds <= odd.seconds * (1 + NEAR)
    entering = {found.assignment.inputs[item.tensor] for item in search.model.space.graph.inputs if item.name.endswith("up.weight")}
    assert len(entering) == 1


def test_odd_layer_stays_where_equal_layers_cost_more_than_they_are_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searched_with_an_odd_layer()
    monkeypatch.setattr(alike, "NEAR", -0.5)
    assert alike.tie_equal_layers(search) is None

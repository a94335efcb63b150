"""One weight for several costs what several do; specs of blocks in pins, plans and edited files."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

import autopar
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.recording import graph_of
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import resolve_pins
from autopar.search.choices.space import Space
from autopar.sharding import Blocks, ShardingSpec, splits
from tests import fused
from tests.graphs import machine


@lru_cache
def graph(*, qkv: bool = True, gate_up: bool = True) -> Graph:
    model = fused.Layer(128, 8, qkv=qkv, gate_up=gate_up, bias=False)
    return autopar.capture(model, (torch.randn(4, 8, 128),), loss=fused.loss)


@lru_cache
def plan_of(*, qkv: bool = True, gate_up: bool = True) -> Plan:
    pins = {"input:x": "R R R"}
    return autopar.plan(graph(qkv=qkv, gate_up=gate_up), mesh="tp=8", cost_model="communication", constraints=pins)


@pytest.mark.parametrize(("qkv", "gate_up"), [(True, False), (False, True), (True, True)])
def test_fused_weights_cost_what_separate_ones_do(qkv: bool, gate_up: bool) -> None:
    separate, plan = plan_of(qkv=False, gate_up=False), plan_of(qkv=qkv, gate_up=gate_up)
    assert plan.objective.seconds == pytest.approx(separate.objective.seconds, rel=1e-9)
    assert plan.objective.status == "optimal"
    assert [row.kind for row in plan.collectives] == [row.kind for row in separate.collectives]
    assert (plan.parameters["qkv.0.weight"].spec == "S0/3 R") == qkv
    assert (plan.parameters["gate_up.0.weight"].spec == "S0/2 R") == gate_up
    if gate_up:  # two products of one value: the baseline sums their gradients apart
        assert plan.baselines["megatron"].objective_seconds == pytest.approx(plan.objective.seconds, rel=1e-9)


def test_a_plan_in_a_file_is_the_plan() -> None:
    plan = plan_of()
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert list(autopar.check(read)) == []
    assert graph_of(read).sha256 == graph().sha256
    assert {item.name: item.blocks for item in graph_of(read).inputs} == {item.name: item.blocks for item in graph().inputs}
    row = read.parameters["qkv.0.weight"]
    assert (row.shape, row.spec, row.blocks) == ((384, 128), "S0/3 R", (0, 3))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"spec": "S0 R"}, "here float32"),
        ({"spec": "S0/2 R"}, "here float32"),
        ({"spec": "R S0"}, "has the spec"),
        ({"blocks": (0, 2)}, "here float32"),
        ({"blocks": None}, "here float32"),
        ({"blocks": (1, 2)}, "here float32"),
    ],
)
def test_edited_blocks_are_found(edit: dict[str, object], words: str) -> None:
    plan = plan_of()
    row = plan.parameters["qkv.0.weight"].model_copy(update=edit)
    found = list(autopar.check(plan.model_copy(update={"parameters": {**plan.parameters, "qkv.0.weight": row}})))
    assert any(words in str(item) for item in found), found


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        ({"qkv.0.weight": "S0 R"}, "cuts across blocks: the graph holds dim 0 as 3"),
        ({"qkv.0.weight": "S0/2 R"}, "cuts across blocks"),
        ({"out.weight": "S0/2 R"}, "does not cut into any"),
        ({"input:x": "R R S0/2"}, "does not cut into any"),
        ({"op:contract": "R R R S0/2"}, "does not cut into any"),
        ({"qkv.0.weight": "S0/0 R"}, "cannot read 'S0/0'"),
        ({"qkv.0.weight": "S0/5 R"}, "not 5 blocks of 8 equal parts"),
    ],
)
def test_pins_that_cannot_be_say_so(pin: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        autopar.plan(graph(), mesh="tp=8", constraints=pin)
    assert raised.value.hint


def test_pins_by_name_of_axis_and_whole_blocks() -> None:
    pins = {"qkv.0.weight": "S(a)/3 R", "gate_up.0.weight": "S(b) R"}
    plan = autopar.plan(graph(), mesh="a=4,b=2", cost_model="communication", constraints=pins)
    assert (plan.parameters["qkv.0.weight"].spec, plan.parameters["gate_up.0.weight"].spec) == ("S0/3 R", "S1 R")
    assert list(autopar.check(plan)) == []
    with pytest.raises(UsageError, match="blocks are split over one"):
        autopar.plan(graph(), mesh="a=4,b=2", constraints={"qkv.0.weight": "S01/3 R"})


def test_a_spec_and_the_graphs_are_each_others_inverse() -> None:
    blocks, sizes, shape = Blocks(0, 6), (2, 3), (6, 12, 4)
    own = {spec: blocks.own_spec(spec, sizes) for spec in splits(shape, sizes)}
    said = {spec: found for spec, found in own.items() if found is not None}
    assert all(blocks.spec(found, sizes) == spec for spec, found in said.items())
    assert len(set(said.values())) == len(said)
    assert str(own[ShardingSpec.parse("S0 S1 R")]) == "None", "each rank has some of the blocks, and of each a part"
    assert all(found.problem(blocks.own_shape(shape), sizes) is None for found in said.values())
    assert blocks.own_shape(blocks.shape((72, 4))) == (72, 4)


def test_plans_written_by_hand_hold_blocks_of_equal_parts_alone() -> None:
    """64 columns lie in unequal parts on 5 ranks, but not those of a weight with two blocks of them: no rank could have held its part."""
    small = autopar.capture(fused.Layer(16, 2, bias=False), (torch.randn(6, 4, 16),), loss=fused.loss)
    space = Space(small, machine("tp=5"), "adamw", resolve_pins(small, machine("tp=5").mesh, {}))
    blocks = {item.tensor: item for item in small.inputs if item.blocks is not None}
    made = find_baselines(space)
    assert blocks and "megatron" in made
    for name, assignment in made.items():
        assert all(space.may_hold(item, assignment.inputs[tensor]) for tensor, item in blocks.items()), name

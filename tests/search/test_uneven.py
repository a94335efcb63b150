"""Which dims the search may split in unequal parts, and that it does where that pays."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import zoo
from autopar.check.parts import illegal
from autopar.compare import explain
from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.graph import Graph
from autopar.importer import capture
from autopar.report import summary
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.choices.uneven import find_uneven_splits
from autopar.search.coarsening.merged_axes import axis_merges
from autopar.sharding import ShardingSpec


def on(mesh: str, cost_model: str = "roofline") -> Machine:
    return Machine(Mesh.parse(mesh), load_hardware("h100-sxm"), cost_model)


def gpt2(vocab: int, mode: str = "train", **sizes: str) -> Graph:
    options = {"layers": "1", "width": "256", "seq": "256", **sizes}
    target = zoo.build("gpt2", device="meta", mode=mode, vocab=str(vocab), **options)
    return capture(target.model, target.args, mode=mode).graph


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama3", "moe", "resnet"])
@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "8x8"])
def test_models_whose_dims_are_divided_are_searched_as_before(name: str, mesh: str) -> None:
    target = zoo.build(name, device="meta")
    found = find_uneven_splits(capture(target.model, target.args, mode="train").graph, on(mesh))
    assert not found.dims and not found.factors


def test_a_vocabulary_is_offered_and_inner_dims_are_not() -> None:
    graph = gpt2(50257)
    found = find_uneven_splits(graph, on("tp=4"))
    assert {shape[dim] for shape, dims in found.dims.items() for dim in dims} == {50257}
    assert not find_uneven_splits(graph, on("tp=4", "communication")).dims, "waste would not be seen"

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 63 * 16)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x).unflatten(-1, (63, 16))
            return torch.relu(hidden).amax(-1).square().sum()

    inner = capture(Inner(), (torch.randn(8, 16),), mode="train").graph
    assert not find_uneven_splits(inner, on("4")).factors, "63 is made by a view, and by nothing that enters"


def test_divided_dims_have_no_more_choices() -> None:
    """A vocabulary that is not divided is split as one that is."""
    spaces = [Space(gpt2(vocab), on("tp=4"), "adamw", Pins()) for vocab in (50257, 50260)]
    for ops in zip(*(space.graph.ops for space in spaces), strict=True):
        odd, even = (space.op_choices(op).strategies for space, op in zip(spaces, ops, strict=True))
        assert [str(item) for item in odd] == [str(item) for item in even], ops[0].name
        assert all(a.parts <= b.parts for a, b in zip(odd, even, strict=True))
    for items in zip(*(space.graph.inputs for space in spaces), strict=True):
        odd_specs, even_specs = (space.input_specs(item) for space, item in zip(spaces, items, strict=True))
        assert odd_specs == even_specs


def test_a_vocabulary_of_50257_is_split_where_that_pays() -> None:
    plans = [autopar.plan(gpt2(vocab), mesh="tp=4", hardware="h100-sxm", time_limit=600.0) for vocab in (50257, 50260)]
    for plan in plans:
        assert plan.parameters["tokens.weight"].spec == "S0 R"
        assert not list(autopar.check(plan))
    odd, even = (plan.objective.seconds for plan in plans)
    assert odd == pytest.approx(even, rel=0.05)


def test_each_rank_has_the_logits_of_its_words_where_little_else_is_done() -> None:
    """Of four tokens: the weight is read once, of which each rank has a part."""
    plan = autopar.plan(gpt2(50257, "inference", batch="1", seq="4", width="1024"), mesh="tp=4", hardware="h100-sxm", time_limit=600.0)
    made = {entry.spec for row in plan.ops for entry in row.outputs if entry.shape == (1, 4, 50257)}
    assert made == {"R R S0"}
    assert not list(autopar.check(plan))


def stored_in_parts() -> autopar.Plan:
    """A linear layer of 63 by 8 whose weight is stored in unequal parts and gathered, with its bias, for the rows of each rank."""
    pins = {"weight": "S0 R", "bias": "S0", "input:input": "S0 R", "output:0": "S0 R"}
    return autopar.plan(nn.Linear(8, 63), (torch.randn(32, 8),), mesh="4", hardware="h100-sxm", mode="inference", constraints=pins)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"shape": (65, 8)}, "weight is float32[65, 8], here float32[63, 8]"),
        ({"shape": (62, 8)}, "weight is float32[62, 8], here float32[63, 8]"),
        ({"spec": "R S0"}, "the reshard starts from 'S0 R'"),
    ],
)
def test_edited_plans_are_found(edit: dict[str, object], words: str) -> None:
    plan = stored_in_parts()
    assert not list(autopar.check(plan))
    row = plan.parameters["weight"].model_copy(update=edit)
    found = "\n".join(map(str, autopar.check(plan.model_copy(update={"parameters": {**plan.parameters, "weight": row}}))))
    assert words in found, found


def test_bytes_that_forget_the_waste_are_found() -> None:
    plan = stored_in_parts()
    assert plan.predicted.memory.parameters == (16 * 8 + 16) * 4, "the largest part counts"
    (row,) = plan.collectives
    assert [part.bytes for part in row.parts or ()] == [64 * 8 * 4, 64 * 4], "63 rows on 4 ranks travel as 64"
    parts = tuple(part.model_copy(update={"bytes": part.bytes * 63 // 64}) for part in row.parts or ())
    edited = row.model_copy(update={"parts": parts, "bytes": sum(part.bytes for part in parts)})
    found = "\n".join(map(str, autopar.check(plan.model_copy(update={"collectives": (edited,)}))))
    assert "2268 in the plan, 2304 recomputed" in found, found


def test_words_say_so() -> None:
    plan = stored_in_parts()
    said = "63 over x: 16 on a rank, 15 on the last; time and memory are those of the largest"
    assert said in summary(plan)
    assert any(said in line for line in explain(plan, "weight"))


def test_pins() -> None:
    model, x = nn.Linear(7, 63), torch.randn(8, 7)
    plan = autopar.plan(model, (x,), mesh="2x2", hardware="h100-sxm", mode="inference", constraints={"weight": "R S0"})
    assert plan.parameters["weight"].spec == "R S0"
    plan = autopar.plan(model, (x,), mesh="2x2", hardware="h100-sxm", mode="inference", constraints={"weight": "S01 R"})
    assert plan.parameters["weight"].spec == "S01 R" and not list(autopar.check(plan))
    row = plan.parameters["weight"].model_copy(update={"spec": "S10 R"})
    found = "\n".join(map(str, autopar.check(plan.model_copy(update={"parameters": {**plan.parameters, "weight": row}}))))
    assert "these are cut in mesh order, S01" in found, found
    assert illegal((63, 7), ShardingSpec.parse("S10 R"), (2, 2)) and not illegal((63, 7), ShardingSpec.parse("S01 S2"), (2, 2, 3))
    with pytest.raises(autopar.AutoparError, match="these are cut in mesh order, S01"):
        autopar.plan(model, (x,), mesh="2x2", hardware="h100-sxm", mode="inference", constraints={"weight": "S10 R"})


def test_axes_together_are_offered_what_one_as_large_is() -> None:
    graph = gpt2(50257)
    found = {str(spec) for spec in Space(graph, on("2x2"), "adamw", Pins()).splits("tokens.weight") if spec.dims[0]}
    assert found == {"S0 R", "S1 R", "S01 R", "S0 S1", "S1 S0"}
    assert find_uneven_splits(gpt2(50258), on("2x2")).dims, "two axes make unequal parts where one makes equal ones"
    (merged,) = (item for item in axis_merges(on("2x2x2x2"), 2) if len(item.members[0]) == 3)
    pins = merged.pins(Pins())
    assert pins is not None and pins.merged == {0}
    space = Space(graph, merged.machine, "adamw", pins)
    specs = {str(spec) for item in graph.inputs if item.name == "tokens.weight" for spec in space.input_specs(item)}
    assert specs == {"R R", "S0 R", "S1 R", "S01 R", "R S0", "R S1", "R S01", "R S10", "S0 S1", "S1 S0"}


def test_waste_is_priced() -> None:
    """Of 50,257 words on 4 ranks the largest part has 12,565, a quarter of 50,260."""
    space = Space(gpt2(50257), on("tp=4"), "adamw", Pins())
    wider = Space(gpt2(50260), on("tp=4"), "adamw", Pins())
    for op, other in zip(space.graph.ops, wider.graph.ops, strict=True):
        choices, same = space.op_choices(op), wider.op_choices(other)
        for number, strategy in enumerate(choices.strategies):
            specs = [*zip(op.inputs, strategy.inputs, strict=True), *zip(op.outputs, strategy.outputs, strict=True)]
            if any(not spec.is_even(space.graph.tensors[name].shape, space.sizes) for name, spec in specs):
                assert math.isclose(choices.seconds[number], same.seconds[number], rel_tol=1e-9), (op.name, str(strategy))

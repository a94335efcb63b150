"""Random legal schedules give what the single-device model gives: every zoo model, train and inference, on meshes of up to three axes.

This is the widest test of the system: capture, rules, reshards, schedule and interpreter must all agree for it to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from autopar.graph import Tensor
from autopar.recording.writing import list_collectives
from autopar.rules import ShardingRule, strategies, way_of
from autopar.runtime.ranks.placement import replica_difference
from autopar.runtime.steps.simulation import simulate
from autopar.sharding import Strategy
from autopar.verify.comparison import planned
from tests import assignments
from tests.graphs import machine, random_schedule
from tests.runtime.models import Example, odds, sixes, zoo_example

MESHES = ("1", "2", "4", "2x2", "8", "2x4")
TOLERANCE = 1e-10
"""Relative, in float64."""


def check(example: Example, mesh: str, seed: int, again: float = 0.0) -> None:
    schedule = random_schedule(example.captured.graph, machine(mesh), seed, again=again)
    found = simulate(schedule, entering(example), dropout=False)
    wanted = example.single
    for (output, value), whole, parts in zip(schedule.outputs, found.outputs, found.parts, strict=True):
        if output.kind == "gradient":
            reference = wanted.gradients[output.name]
        else:
            reference = wanted.outputs[f"buffer:{output.name}" if output.kind == "buffer" else output.name]
        scale = max(1e-3, reference.abs().max().item())
        assert (whole - reference).abs().max().item() <= TOLERANCE * scale, f"{output.kind} {output.name}"
        assert replica_difference(parts, schedule.specs[value], schedule.machine.mesh) <= TOLERANCE * scale
    where = schedule.machine.mesh
    assert [item.row(where) for item in found.observed] == [planned(row) for row in list_collectives(schedule)]


def entering(example: Example) -> dict[str, torch.Tensor]:
    """A value for each graph input."""
    model, case = example.model, example.case
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    source = {
        "parameter": held, "buffer": held, "constant": example.captured.constants, "input": case.inputs(), "tangent": case.tangents,
    }  # fmt: skip
    return {item.tensor: source[item.kind][item.name].detach() for item in example.captured.graph.inputs}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama3", "resnet", "moe"])
def test_random_plans_run_right(name: str, mode: str, mesh: str) -> None:
    for seed, again in enumerate((0.0, 0.4) if mode == "train" else (0.0, 0.0)):
        check(zoo_example(name, mode), mesh, seed, again)


@pytest.mark.parametrize("again", [0.0, 1.0])
@pytest.mark.parametrize("mesh", ["2", "4", "2x2"])
@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_keys_and_values_that_travel(monkeypatch: pytest.MonkeyPatch, name: str, mesh: str, again: float) -> None:
    """Under a causal mask, of grouped heads, in a second run: wherever the sequence can be split in a ring, it is."""

    def in_rings(rule: ShardingRule, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Strategy]:
        found = strategies(rule, tensors, sizes)
        return [item for item in found if way_of(item) == "ring"] or found

    monkeypatch.setattr(assignments, "strategies", in_rings)
    check(zoo_example(name, "train"), mesh, 0, again)


@pytest.mark.parametrize("mesh", ["3", "2x3", "3x2", "6"])
def test_axes_that_are_no_powers_of_two(mesh: str) -> None:
    for seed in range(8):
        check(sixes(), mesh, seed)


@pytest.mark.parametrize(("mesh", "seeds"), [("2", 6), ("4", 8), ("2x2", 6), ("3", 6), ("2x3", 6), ("5", 3)])
def test_unequal_parts(mesh: str, seeds: int) -> None:
    """Dims that the axes do not divide: 7 rows, 63 tokens' vocabulary, 9 wide."""
    for seed in range(seeds):
        check(odds(), mesh, seed)


@pytest.mark.parametrize("mesh", ["3", "2x3", "5"])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "resnet", "moe"])
def test_models_on_meshes_that_do_not_divide_them(name: str, mesh: str) -> None:
    check(zoo_example(name, "train"), mesh, 0)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2", "4", "2x2", "3", "2x3", "5", "2x4"])
def test_more_unequal_parts(mesh: str) -> None:
    for seed in range(100, 160):
        check(odds(), mesh, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "seeds"), [*((mesh, 20) for mesh in MESHES), ("2x2x2", 3), ("16", 5), ("4x4", 5)])
@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama3", "resnet", "moe"])
def test_more_random_plans_run_right(name: str, mode: str, mesh: str, seeds: int) -> None:
    for seed in range(100, 100 + seeds):
        check(zoo_example(name, mode), mesh, seed)


def test_values_are_dropped_after_their_last_use() -> None:
    from autopar.runtime.execution.binding import bind
    from autopar.runtime.ranks.backends import LockstepRanks
    from autopar.runtime.ranks.placement import scatter

    example = zoo_example("mlp", "train")
    where = machine("2x2")
    schedule = random_schedule(example.captured.graph, where, 3)
    executable = bind(schedule, LockstepRanks(where.mesh), torch.device("cpu"))
    whole = entering(example)
    parts = {name: scatter(tensor, schedule.specs[name], where.mesh) for name, tensor in whole.items()}
    ranks = [{name: tensors[rank] for name, tensors in parts.items()} for rank in range(4)]
    executable.forward(ranks)
    outputs = {value for _, value in schedule.outputs}
    for values in ranks:
        assert set(values) - set(executable.kept) <= outputs | set(whole)
    executable.backward(ranks)
    for values in ranks:
        assert set(values) == outputs | set(whole)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.nn.functional.dropout(x, 0.5, True),
        lambda x: torch.nn.functional.dropout1d(x.unsqueeze(-1), 0.5, True).squeeze(-1),
        lambda x: torch.nn.functional.alpha_dropout(x, 0.5, True),
        torch.randn_like,
        lambda x: torch.bernoulli(x / 2),
        lambda x: torch.rand(8, 64) + x,
        lambda x: torch.empty_like(x).exponential_(),
    ],
)
def test_replicas_share_what_is_drawn_and_shards_differ(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    from autopar.dialect import random_step
    from autopar.importer import capture
    from autopar.rules import find_rule, strategies
    from autopar.schedule import Assignment, make_schedule
    from autopar.sharding import ShardingSpec

    class Draw(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return draw(x)

    x = torch.ones(8, 64)
    graph = capture(Draw(), (x,), mode="train").graph
    where = machine("2x2")
    chosen = {}
    for op in graph.ops:  # rows over axis 0 everywhere
        of_op = [graph.tensors[name] for name in (*op.inputs, *op.outputs)]
        found = strategies(find_rule(op, graph.tensors), of_op, where.mesh.sizes)
        chosen[op.name] = next(item for item in found if {str(spec)[:2] for spec in (*item.inputs, *item.outputs)} == {"S0"})
    schedule = make_schedule(graph, Assignment({"x": ShardingSpec.parse("S0 R")}, chosen), where)
    parts = simulate(schedule, {"x": x}).parts[0]
    assert parts[0].equal(parts[1]) and parts[2].equal(parts[3]), "ranks 0 and 1 hold the same rows"
    assert not parts[0].equal(parts[2]), "ranks 0 and 2 hold different rows"
    assert simulate(schedule, {"x": x}).parts[0][0].equal(parts[0]), "the same step, the same numbers"
    with random_step(1):
        assert not simulate(schedule, {"x": x}).parts[0][0].equal(parts[0]), "another step, other numbers"

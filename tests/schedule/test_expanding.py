"""Slices of expansions left out: the same values and seconds, and no more memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.check import check
from autopar.graph import Graph
from autopar.importer import capture
from autopar.rules import is_expansion
from autopar.runtime.execution.binding import bind
from autopar.runtime.ranks.backends import LockstepRanks
from autopar.runtime.ranks.placement import gather
from autopar.runtime.steps.accumulation import run_step
from autopar.runtime.steps.simulation import entering, scatter_all
from autopar.schedule import Schedule, memory, step_seconds
from autopar.schedule.expanding import expand_as_read
from autopar.schedule.freeing import free
from autopar.schedule.in_place import assign_in_place, clear_in_place
from autopar.schedule.legality import check_legal
from tests.graphs import machine, plan_of, random_schedule


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        made = x * self.p
        return (made + made.mean()).square().mean()


def slices(schedule: Schedule) -> int:
    """How many slices there are of what an expansion makes."""
    made = {value for item in schedule.instructions if item.kind == "run" for value in item.writes
            if is_expansion(schedule.operations[item.of].op, schedule.graph.tensors)}  # fmt: skip
    return sum(item.kind == "slice" and item.reads[0] in made for item in schedule.instructions)


def outputs(schedule: Schedule) -> list[Tensor]:
    """Loss and gradients, whole."""
    mesh, tensors = schedule.machine.mesh, [schedule.graph.tensors[item.tensor] for item in schedule.graph.inputs]
    whole = {tensor.name: torch.arange(tensor.elements).reshape(tensor.shape) / 64 for tensor in tensors}
    scattered = {name: scatter_all(schedule, name, value) for name, value in whole.items()}
    executable = bind(schedule, LockstepRanks(mesh), torch.device("cpu"))
    ranks = run_step(executable, range(mesh.ranks), lambda number: entering(scattered, number, mesh.ranks))
    return [gather([held[value] for held in ranks], schedule.specs[value], mesh) for _, value in schedule.outputs]


@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_expansions_make_what_is_read_of_them(mesh: str) -> None:
    graph: Graph = capture(Mean(), (torch.randn(16, 8, 8),), mode="train").graph
    fewer = 0
    for seed in range(12):
        drawn = random_schedule(graph, machine(mesh), seed)
        before = clear_in_place(replace(drawn, instructions=tuple(item for item in drawn.instructions if item.kind != "free")))
        made = expand_as_read(before)
        after = check_legal(free(assign_in_place(made)), "expand_as_read")
        fewer += slices(before) - slices(made)
        assert step_seconds(after, "adamw") == pytest.approx(step_seconds(drawn, "adamw"))
        assert memory(after, "adamw").peak <= memory(drawn, "adamw").peak
        assert check(plan_of(after)) == ()
        for mine, other in zip(outputs(after), outputs(drawn), strict=True):
            torch.testing.assert_close(mine, other)
    assert fewer

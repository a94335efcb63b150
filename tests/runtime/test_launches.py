"""What a schedule says that the host issues, against the calls of torch that each instruction makes on a rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autopar.check import check
from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.runtime.execution.binding import Binding
from autopar.runtime.execution.loss_tail import Tail
from autopar.runtime.instructions.gradient_pairs import TO_INPUT, TO_WEIGHT
from autopar.runtime.ranks.backends import LoneRank
from autopar.runtime.ranks.placement import own_shape
from autopar.schedule import Schedule
from autopar.schedule.instructions import Instruction
from benchmarks.host import counted_kernels
from tests.graphs import plan_of, random_schedule
from tests.runtime.models import zoo_example

MODELS = ("mlp", "gpt2", "llama3", "resnet", "moe")
MESHES = ("1", "3", "2x2")
UNCOUNTED = frozenset({"promote_types.default", "new_zeros.default"})
"""Questions about dtypes, and indices that a rank receives from nobody. A fill with zeros in an operator's body is ``zeros``."""
CALLS = {"start": 1, "wait": 1}
"""Calls of a collective, which are none of ATen."""


def counted_on_rank(schedule: Schedule) -> Iterator[tuple[Instruction, int]]:
    """Each instruction of a step, and the calls of torch that it makes on the first rank, which receives nothing.

    Left out are counters that step in one call, and means that are one: prices have them one by one.
    """
    backend, device = LoneRank(schedule.machine.mesh), torch.device("cpu")
    binding = Binding(schedule, backend, device, True, True, Tail())
    values = {item.tensor: stand_in(schedule, item.tensor) for item in schedule.graph.inputs}
    flights: dict = {}
    joined = {place for group in binding.counters.values() for place in group}
    joined.update(place for mean in binding.means.values() for place in mean.places)
    for place, item in enumerate(schedule.instructions):
        segment = binding.segment("one", [place])
        with torch.no_grad(), counted_kernels() as found:
            segment([values], flights, None)
        if place in joined:
            continue
        yield item, sum(count for name, count in found.items() if name not in UNCOUNTED)


def host_machine(mesh: str) -> Machine:
    """One whose host has a price."""
    return Machine(Mesh.parse(mesh), load_hardware("h100-sxm"), "roofline", "eager")


def stand_in(schedule: Schedule, value: str) -> torch.Tensor:
    """Numbers that may be looked up, and sums that are not zero."""
    dtype = getattr(torch, schedule.graph.tensors[value].dtype)
    shape = own_shape(schedule, value, 0)
    return torch.rand(shape).to(dtype) + 1 if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


ELSEWHERE = ("attention", "expert_contract", "grouped", "embedding", "nll_loss")
"""Operators whose kernels on a CPU are others than on a GPU, or depend on which experts have rows: see ``tests/rules/test_launches.py``."""
BY_LAYOUT = ("aten.add.Tensor", "autopar.contract.default", "aten.view.default", TO_INPUT, TO_WEIGHT)
"""Operators that copy operands which lie otherwise in memory, or that run with another one where none comes between them."""


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_issues_what_its_schedule_says(name: str, mesh: str) -> None:
    """Each operator by itself, and all together: a call that another one reads in flight copies its targets when that one starts."""
    schedule = random_schedule(zoo_example(name, "train").captured.graph, host_machine(mesh), 0, again=0.2)
    priced = real = 0
    for item, found in counted_on_rank(schedule):
        operation = schedule.operations.get(item.of) if item.kind == "run" else None
        target = operation.op.target if operation else ""
        if item.launches is None or any(word in target for word in ELSEWHERE):
            continue
        calls = 2 * len(operation.strategy.inner) if operation else CALLS.get(item.kind, 0)
        priced, real = priced + item.launches, real + found + calls
        if operation and target not in BY_LAYOUT:
            assert item.launches == found + calls, (item, operation)
    assert priced == pytest.approx(real, rel=0.11)
    assert check(plan_of(schedule)) == ()

"""Programs that keep values on the host: gradients are those of the plain model, memory is as predicted, forms that cannot are refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

import autopar
from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.recording import replay
from autopar.runtime.execution.binding import bind
from autopar.runtime.ranks.backends import LoneRank
from autopar.runtime.ranks.collectives import Flights, Values
from autopar.runtime.ranks.groups import groups_needed
from autopar.runtime.ranks.offloading import Transfer
from autopar.runtime.steps.simulation import simulate
from autopar.schedule.freeing import free
from autopar.verify.live_memory import LiveMemory
from tests.offloading import free_plan, graph, make, offloaded


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_are_those_without_the_host(microbatches: int) -> None:
    plan = offloaded(microbatches)
    assert len(plan.copies) > 3
    schedule = replay(Plan.from_json(plan.to_json()), graph(microbatches))
    model, (x,) = make()
    tensors = dict(model.named_parameters())
    values = {item.tensor: (x if item.kind == "input" else tensors[item.name]).detach() for item in schedule.graph.inputs}
    found = simulate(schedule, values)
    assert not any(one.kind in ("to_host", "from_host") for one in found.observed), "copies are no collectives"
    wanted = copy.deepcopy(model)
    loss = wanted(x)
    loss.backward()
    for (output, _), tensor in zip(schedule.outputs, found.outputs, strict=True):
        if output.kind == "gradient":
            right = dict(wanted.named_parameters())[output.name].grad
            assert right is not None
            torch.testing.assert_close(tensor, right)
        elif output.name == "loss":
            torch.testing.assert_close(tensor, loss.detach())


def test_copies_are_counted_as_the_hosts_and_the_rank_holds_what_is_predicted() -> None:
    plan = offloaded()
    schedule = replay(plan, graph())
    rank = LoneRank(schedule.machine.mesh)
    executable = bind(schedule, rank, torch.device("cpu"), dropout=False)
    graph_inputs = schedule.graph.inputs
    sizes, coordinates = schedule.machine.mesh.sizes, schedule.machine.mesh.coordinates(0)
    values: Values = {}
    for item in graph_inputs:
        tensor = schedule.graph.tensors[item.tensor]
        values[item.tensor] = torch.zeros(schedule.specs[item.tensor].own_shape(tensor.shape, sizes, coordinates))
    states = plan.predicted.memory.optimizer
    with LiveMemory(list(values.values())) as memory:
        executable.forward([values])
        executable.backward([values])
    assert memory.peak + states == plan.predicted.peak_memory_bytes_per_rank
    assert memory.host_peak == plan.predicted.peak_host_bytes_per_rank


def test_what_a_copy_reads_may_be_on_its_way() -> None:
    """A copy waits for the calls that bring its source, which later waits find landed."""
    schedule = replay(offloaded(), graph())
    call = next(call for call in schedule.calls if call.kind == "to_host")

    class Bringing:
        last: tuple[str, ...] = ()
        of, targets = call, (call.parts[0].source,)

        def land(self, flight: object, ranks: Sequence[Values]) -> None:
            for held in ranks:
                held[self.targets[0]] = torch.ones(3)

    flights: Flights = {}
    bringing = Transfer(call, torch.device("cpu"))
    bringing.start([{call.parts[0].source: torch.ones(3)}], flights, None)
    flights["earlier"] = flights.pop(call.id)
    earlier = Bringing()
    earlier.of = type(call)("earlier", call.parts)
    copying, came = Transfer(call, torch.device("cpu"), (earlier,)), [Values()]
    copying.start([{}], flights, None)
    assert flights["earlier"].wait is None and flights["earlier"].landed is not None
    copying.finish(came, flights, None)
    assert torch.equal(came[0][call.parts[0].target], torch.ones(3))


def test_no_group_of_ranks_is_made_for_copies() -> None:
    assert () not in groups_needed(replay(offloaded(), graph()))


def test_a_traced_program_is_refused() -> None:
    schedule = replay(offloaded(), graph())
    with pytest.raises(UsageError, match="keeps values on the host"):
        bind(schedule, LoneRank(schedule.machine.mesh, traced=True), torch.device("cpu"), in_place=False)


def test_the_free_plan_copies_nothing() -> None:
    assert not any(call.is_transfer for call in free(free_plan().schedule).calls)
    assert autopar.plan(graph(), mesh="dp=2", effort="low", time_limit=300).transfers is None

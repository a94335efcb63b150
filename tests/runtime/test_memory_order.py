"""Values that repeat, or lie turned or with gaps, where they are needed in order: a rank holds what the schedule says."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor, nn

from autopar.check import check
from autopar.graph import Graph
from autopar.importer import capture
from autopar.runtime.execution import binding
from autopar.runtime.execution.binding import bind
from autopar.runtime.instructions.code import Code
from autopar.runtime.ranks.backends import LockstepRanks
from autopar.runtime.steps.accumulation import run_step
from autopar.runtime.steps.simulation import entering, scatter_all
from autopar.schedule import Instruction, Limits, Schedule
from autopar.schedule.liveness import held
from autopar.verify.live_memory import LiveMemory
from tests.graphs import machine, plan_of, random_schedule

LEAN = Limits(0, 0, 0)
"""Nothing is in flight beside anything else."""


class Module(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w).square().mean()


def _mean(x: Tensor, w: Tensor) -> Tensor:
    made = x * w
    return made + made.mean()


def _batch_norm(x: Tensor, w: Tensor) -> Tensor:
    repeated = (x * w).mean(1, keepdim=True).expand(16, 8, 8)
    return nn.functional.batch_norm(repeated, None, None, training=True) * x


def _attention(x: Tensor, w: Tensor) -> Tensor:
    repeated = (x * w)[:, None].mean(3, keepdim=True).expand(16, 1, 8, 8)
    return nn.functional.scaled_dot_product_attention(x[:, None], repeated, x[:, None])


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "rows": lambda x, w: x * w.sum(0, keepdim=True).expand(8, 8) + (x * w).sum(1, keepdim=True),
    "product of an expansion": lambda x, w: (x @ w).mean(0, keepdim=True).expand(16, 8, 8) @ w,
    "product of windows": lambda x, w: (x * w).unfold(1, 6, 2) @ w[:6],
    "batch norm": _batch_norm,
    "attention": _attention,
    "columns": lambda x, w: torch.cat([(x @ w).sin(), x], -1) @ torch.cat([w, w]),
    "halves": lambda x, w: (x @ torch.cat([w, w], 1)).split(8, -1)[1].cumsum(0) * x,
    "turned": lambda x, w: ((x * w).transpose(0, 1).sin() + w[:, None]).cumsum(0) @ w,
}


@lru_cache
def graph(name: str) -> Graph:
    return capture(Module(FUNCTIONS[name]), (torch.randn(16, 8, 8),), mode="train").graph


def levels(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The most bytes of a rank while each instruction runs, by its place in the list."""
    mesh, found = schedule.machine.mesh, dict[int, int]()

    def note(index: int) -> None:
        found[index], live.peak = live.peak // mesh.ranks, live.total

    def noted(write: Callable[..., None], self: object, code: Code, index: int, item: Instruction) -> None:
        write(self, code, index, item)
        code.add(f"{code.object(partial(note, index))}()")

    monkeypatch.setattr(binding, "WRITE", {kind: partial(noted, write) for kind, write in binding.WRITE.items()})
    executable = bind(schedule, LockstepRanks(mesh), torch.device("cpu"))
    tensors = schedule.graph.tensors
    scattered = {item.tensor: scatter_all(schedule, item.tensor, torch.ones(tensors[item.tensor].shape)) for item in schedule.graph.inputs}
    with LiveMemory(part for parts in scattered.values() for one in parts for part in one) as live:
        run_step(executable, range(mesh.ranks), lambda number: entering(scattered, number, mesh.ranks), draw=0)
    return found


def copying(schedule: Schedule) -> list[int]:
    """The places of calls that copy such a value alone, and of operators that copy one."""
    return [
        index
        for index, item in enumerate(schedule.instructions)
        if (item.kind == "start" and [part.copied for part in schedule.collectives[item.of].parts] == [True])
        or (item.kind == "run" and schedule.operations[item.of].copied)
    ]


@pytest.mark.parametrize("mesh", ["2", "2x2"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_copies_of_what_does_not_lie_in_order_take_what_was_predicted(name: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules drawn at random, which reshard everything anywhere: ranks hold what they say, and so does ``check``."""
    seen = 0
    for seed in range(6):
        schedule = random_schedule(graph(name), machine(mesh), seed, LEAN)
        wanted = copying(schedule)
        if not all(value.spec is None or value.spec.is_even(graph(name).tensors[value.tensor].shape, schedule.machine.mesh.sizes)
                   for value in schedule.values.values()):  # fmt: skip
            continue
        with monkeypatch.context() as patch:
            found = levels(schedule, patch)
        predicted = held(schedule, "none")
        assert {index: found[index] for index in wanted} == {index: predicted[index] for index in wanted}
        assert check(plan_of(schedule)) == ()
        seen += len(wanted)
    assert seen >= 3, "schedules that copy such values"

"""Steps of all ranks at once, in this process and in lockstep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.execution.binding import bind
from autopar.runtime.ranks.backends import LockstepRanks
from autopar.runtime.ranks.collectives import Observed, Values
from autopar.runtime.ranks.placement import gather, scatter
from autopar.runtime.steps.accumulation import run_step
from autopar.schedule import Schedule

Parts = list[list[Tensor]]
"""For each microbatch the parts of all ranks; one entry where all microbatches have the same."""


def scatter_all(schedule: Schedule, name: str, whole: Tensor) -> Parts:
    """The parts of a graph input, of the whole batch where it is cut."""
    count = schedule.graph.parts(name)
    return [scatter(part, schedule.specs[name], schedule.machine.mesh) for part in (whole.chunk(count) if count > 1 else (whole,))]


def entering(scattered: Mapping[str, Parts], number: int, ranks: int) -> list[Values]:
    """What a microbatch of each rank begins with."""
    return [{name: parts[number % len(parts)][rank] for name, parts in scattered.items()} for rank in range(ranks)]


@dataclass(frozen=True)
class Simulation:
    """What a simulated run gave.

    Args:
        outputs: one global tensor for each entry of ``Schedule.outputs``.
        parts: the same, rank by rank.
        observed: the collectives executed.
    """

    outputs: tuple[Tensor, ...]
    parts: tuple[list[Tensor], ...]
    observed: tuple[Observed, ...]


def simulate(
    schedule: Schedule, values: Mapping[str, Tensor], *, dropout: bool = True, device: torch.device | str = "cpu",
    ranks: LockstepRanks | None = None,
) -> Simulation:  # fmt: skip
    """Runs all ranks in this process, in lockstep.

    Args:
        values: a global tensor for each of the graph's inputs, by tensor name; of an input that is cut, that of the whole batch.
        device: on which they all compute.
        ranks: all of the mesh; in lockstep, each with memory of its own, when not given.
    """
    mesh = schedule.machine.mesh
    executable = bind(schedule, LockstepRanks(mesh) if ranks is None else ranks, torch.device(device), dropout=dropout)
    scattered = {item.tensor: scatter_all(schedule, item.tensor, values[item.tensor]) for item in schedule.graph.inputs}
    observed: list[Observed] = []
    held = run_step(executable, range(mesh.ranks), lambda number: entering(scattered, number, mesh.ranks), observed)
    parts = tuple([one[value] for one in held] for _, value in schedule.outputs)
    outputs = tuple(gather(local, schedule.specs[value], mesh) for local, (_, value) in zip(parts, schedule.outputs, strict=True))
    return Simulation(outputs, parts, tuple(observed))

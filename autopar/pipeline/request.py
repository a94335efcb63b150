"""What is asked of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.cost_models import Machine
from autopar.effort import DEFAULT_EFFORT, Effort
from autopar.pipeline.cutting import stage_mesh
from autopar.pipeline_plan import OrderName
from autopar.search import Progress


@dataclass(frozen=True)
class PipelineRequest:
    """What is asked of a pipeline.

    Args:
        machine: all ranks; the outermost axis is ``pp``.
        memory_limit: bytes per rank.
        cut: the first module of each stage but the first; None to choose.
        pins: as for ``find_plan``, on the whole graph; axes are those of a stage.
        recompute: whether operators may run a second time in backward.
        order: of each stage's actions.
        chunks: stages of each rank; more than one where they are interleaved.
        effort, seed, progress: of each search, see ``find_plan``.
        deadline: when the searches end, of ``perf_counter``.
    """

    machine: Machine
    memory_limit: int
    optimizer: str = "adamw"
    cut: tuple[str, ...] | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    recompute: bool = True
    order: OrderName = "auto"
    chunks: int = 1
    effort: Effort = DEFAULT_EFFORT
    seed: int = 0
    deadline: float = math.inf
    progress: Progress | None = None

    @property
    def positions(self) -> int:
        """Ranks along the axis of stages."""
        return self.machine.mesh.sizes[0]

    @property
    def count(self) -> int:
        """Number of stages."""
        return self.positions * self.chunks

    @property
    def stage_machine(self) -> Machine:
        """The ranks of one stage."""
        return replace(self.machine, mesh=stage_mesh(self.machine.mesh))

"""Screening: what plans by hand would take on a mesh, without a search. Meshes and numbers of microbatches are ranked by it.

A graph of many equal layers is scheduled at two small depths. Seconds and memory at its own depth are on the line through them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from autopar.cost_models import Machine
from autopar.graph import Graph
from autopar.schedule import Assignment
from autopar.schedule.limit_search import LimitSearch
from autopar.schedule.scheduled_plan import Sample, ScheduledPlan
from autopar.search.baselines.checkpointing import apply_policies
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import resolve_pins
from autopar.search.choices.space import Space
from autopar.search.driver.result import Shared
from autopar.search.folding.fold import Folding, fold_layers
from autopar.search.settings import SCREENING_DEPTHS

SCREENED = ("ddp", "fsdp", "megatron_sp", "torchtitan", "expert", "expert_fsdp")
"""Baselines that are estimated. For Llama-3-70B on ten meshes of 256 devices the best of all is one of them, in half of the CPU seconds."""


@dataclass(frozen=True)
class Screened:
    """The best plan by hand on a mesh.

    Args:
        name: of the baseline.
        seconds: of its step.
        peak: bytes of a rank.
        recomputes: whether it recomputes operators.
    """

    name: str
    seconds: float
    peak: int
    recomputes: bool = False

    def worth(self, limit: int) -> tuple[int, float]:
        """Sorts screened plans under a limit of bytes a rank, the best first: those that fit by seconds, the others by bytes."""
        return (0, self.seconds) if self.peak <= limit else (1, float(self.peak))


def screen_baselines(
    graph: Graph, machine: Machine, limit: int, optimizer: str, pins: Mapping[str, str], *, recompute: bool, shared: Shared
) -> Screened | None:  # fmt: skip
    """The best plan by hand, estimated; None where none applies.

    Args:
        limit: bytes of a rank.
        pins: name to spec.
        recompute: backward may recompute tensors of forward.
        shared: a search of the same graph on the machine may use the space.

    Raises:
        UsageError: a pin names nothing or is illegal on the mesh.
    """
    resolved, steps = resolve_pins(graph, machine.mesh, pins), optimizer if graph.mode == "train" else "none"
    folding = fold_layers(graph) if machine.overlaps else None
    plans = dict[str, Assignment]()
    if folding is not None and (kept := folding.pins(resolved)) is not None:
        folded = partial(Space, folding.graph, machine, steps, kept)
        found = find_baselines(shared.space("folded", folded), SCREENED)
        plans = {name: plan for name, plan in found.items() if folding.unfolds(plan)}
    if not plans:
        folding, space = None, shared.space("whole", lambda: Space(graph, machine, steps, resolved))
        plans = find_baselines(space, SCREENED)
    screening = _Screening(graph, machine, steps, limit, folding)
    return screening.run(plans, may_recompute=recompute and machine.overlaps and graph.mode == "train")


@dataclass(frozen=True)
class _Screening:
    """Estimates of plans by hand.

    Args:
        limit: bytes of a rank.
        folding: with the graph of the assignments; None where they are of the whole graph.
    """

    graph: Graph
    machine: Machine
    optimizer: str
    limit: int
    folding: Folding | None

    def run(self, plans: Mapping[str, Assignment], *, may_recompute: bool) -> Screened | None:
        """The best of the plans, and of those that recompute where memory is short."""
        rivals = {name: self._estimate(plan) for name, plan in plans.items()}
        found = [Screened(name, rival.step_seconds, rival.memory.peak) for name, rival in rivals.items()]
        best = min((rival.seconds for rival in rivals.values() if rival.memory.peak <= self.limit), default=math.inf)
        for name, rival in sorted(rivals.items(), key=lambda item: item[1].seconds) if may_recompute else ():
            fits = rival.memory.peak <= self.limit
            if fits or rival.memory.resting > self.limit or rival.busiest_seconds() >= best:
                continue
            graph = self.graph if self.folding is None else self.folding.graph
            for policy, leaner in apply_policies(graph, rival.assignment, self.machine):
                tried = self._estimate(leaner)
                found.append(Screened(f"{name}+{policy}", tried.step_seconds, tried.memory.peak, recomputes=True))
                if tried.memory.peak <= self.limit:
                    best = min(best, tried.seconds)
                    break
        return min(found, key=lambda one: one.worth(self.limit), default=None)

    def _estimate(self, assignment: Assignment) -> ScheduledPlan:
        """The assignment under the usual limits of the passes, or under the leanest where these do not fit."""
        whole, folding = (Sample(1.0, self.graph, assignment),), self.folding
        samples = whole if folding is None else folding.samples(assignment, SCREENING_DEPTHS)
        return LimitSearch(assignment, samples, self.machine, self.optimizer, self.limit).run(None, 0, improve=False)

"""Schedules to hold the passes against: graphs written by hand, drawn and captured, with assignments drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

from autopar import zoo
from autopar.cost_models import Hardware, Machine, Mesh, load_hardware
from autopar.graph import Graph
from autopar.importer import capture_graph
from autopar.schedule import Limits, Schedule, ordered
from autopar.schedule.passes import ENDING, PLACING
from tests.assignments import random_assignment
from tests.graphs import two_layers
from tests.search.small_graphs import small_graph

CAPTURED = {"mlp": {}, "gpt2": {"layers": 1}, "moe": {"layers": 1}, "gpt2 bfloat16": {"layers": 1}}
"""Sizes by name, and what it computes in beside its own dtype."""
KIB = 2**10


@cache
def graph_of(name: str) -> Graph:
    """``two_layers``, ``small-SEED``, or a model of the zoo, training."""
    if name == "two_layers":
        return two_layers(64, 32, 64)
    if name.startswith("small-"):
        return small_graph(int(name.removeprefix("small-")))
    model, _, dtype = name.partition(" ")
    target = zoo.build(model, mode="train", **CAPTURED[name])
    call = {"loss": target.loss, "loss_args": target.loss_args, "compute_dtype": dtype or None}
    return capture_graph(target.model, target.args, target.kwargs, mode="train", **call)


@cache
def hardware_of(launch_overlaps: bool) -> Hardware:
    """A GPU, with two kinds of links in a mesh of 8 and a host that issues as fast as operators run; or a CPU's way of starting."""
    data = load_hardware("h100-sxm").to_dict() | {"name": "nodes-of-2", "devices_per_node": 2, "overlap_slowdown": 0.2}
    return Hardware.from_dict(data | {"launch_overlaps": launch_overlaps, "host": {"issue_seconds": {"eager": 4e-6}}})


@dataclass(frozen=True)
class Case:
    """One assignment of one graph on one mesh, under some limits.

    Where the seed is odd operators run again. Every third host has a price.
    """

    graph: str
    mesh: str
    seed: int

    def __str__(self) -> str:
        return f"{self.graph}-{self.mesh}-{self.seed}"

    @property
    def machine(self) -> Machine:
        return Machine(Mesh.parse(self.mesh), hardware_of(self.seed % 4 != 3), "roofline", "eager" if self.seed % 3 == 1 else None)

    @property
    def limits(self) -> Limits:
        """Drawn: from nothing to no limit, so that each bites somewhere."""
        chance = random.Random(self.seed)
        sizes = [chance.choice((0, KIB, 16 * KIB, 256 * KIB, 2**40)) for _ in range(3)]
        return Limits(*sizes)

    def stages(self) -> list[tuple[str, Schedule]]:
        """After ``order`` and after each pass, by name."""
        graph = graph_of(self.graph)
        assignment = random_assignment(graph, self.machine, self.seed, again=0.5 * (self.seed % 2))
        schedule = replace(ordered(graph, assignment, self.machine), limits=self.limits)
        found = [("order", schedule)]
        for name, run in (*PLACING, *ENDING):
            schedule = run(schedule)
            found.append((name, schedule))
        return found


CASES = [
    *(Case("two_layers", mesh, seed) for mesh in ("x=4", "x=2,y=2", "x=2,y=2,z=2") for seed in range(6)),
    *(Case(f"small-{seed}", mesh, seed) for mesh in ("x=2", "x=2,y=2") for seed in range(20)),
    *(Case(name, mesh, seed) for name in CAPTURED for mesh in ("x=2", "x=2,y=2") for seed in range(2)),
]

"""All that tests draw: meshes, machines, specs, graphs, assignments, schedules, plans, and problems of the solvers.

Each hypothesis strategy draws a seed and calls the generator of that kind, so that a test with a seed and one with ``@given`` see the same
values. The generators stand here too, by name: import them from this module.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from hypothesis import strategies as st

from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.schedule import Assignment, Limits, Schedule
from autopar.sharding import ShardingSpec
from autopar.solvers import Problem
from autopar.solvers.pipeline import PipelineProblem
from tests.assignments import random_assignment
from tests.graphs import machine, plan_of, random_graph, random_plan, random_schedule, two_layers
from tests.reshard_cases import all_specs
from tests.search.small_graphs import small_graph, small_machine, small_pins
from tests.solvers.pipeline.problems import random_pipeline
from tests.solvers.problems import random_problem

__all__ = [
    "LIMITS", "MESHES", "SEEDS", "SMALL_MESHES", "all_specs", "any_machine", "any_schedule", "assignments", "graphs", "machine",
    "machines", "pipelines", "plan_of", "plans", "problems", "random_assignment", "random_graph", "random_plan", "random_problem",
    "random_schedule", "schedules", "small_graph", "small_graphs", "small_machine", "small_machines", "small_pins", "specs",
    "two_layers", "view_shapes",
]  # fmt: skip

SEEDS = st.integers(0, 10**6)
SMALL_MESHES = st.sampled_from(["x=2", "x=4", "x=2,y=2"])
"""For searches that are compared with trying everything."""
MESHES = ("dp=2", "dp=2,tp=4", "x=2,y=1,z=2", "x=2,y=2,z=2")
"""For schedules; one has an axis of size 1."""
LIMITS = (None, Limits(0, 0), Limits(100, 500), Limits(400, 3000, 300), Limits(2000, 0, 10**6))
"""Without buckets, with little in flight, with filled gaps, with large buckets."""


def any_machine(chance: random.Random) -> Machine:
    """A mesh of a small cluster whose nodes, slowdown and cost model are drawn too."""
    hardware = replace(
        load_hardware("cpu-cluster"), devices_per_node=chance.choice((1, 2, 4, 8)), overlap_slowdown=chance.choice((0.0, 0.3, 0.9))
    )  # fmt: skip
    return Machine(Mesh.parse(chance.choice(MESHES)), hardware, chance.choice(("roofline", "roofline", "communication")))


def any_schedule(seed: int) -> Schedule:
    """A random schedule of a random graph on a machine that is drawn too."""
    chance = random.Random(seed)
    where = any_machine(chance)
    graph = random_graph(seed, chance.randint(1, 8))
    return random_schedule(graph, where, seed, chance.choice(LIMITS), again=chance.choice((0.0, 0.3, 1.0)))


def machines() -> st.SearchStrategy[Machine]:
    """See ``any_machine``."""
    return SEEDS.map(lambda seed: any_machine(random.Random(seed)))


def small_machines(mesh: str) -> st.SearchStrategy[Machine]:
    """Machines on which computing and communicating take about as long."""
    return SEEDS.map(partial(small_machine, mesh=mesh))


def specs(shape: tuple[int, ...], sizes: tuple[int, ...], *, uneven: bool = False) -> st.SearchStrategy[ShardingSpec]:
    """Legal specs of a tensor on a mesh of these sizes, partial ones too."""
    return st.sampled_from(all_specs(shape, sizes, uneven=uneven))


def graphs(layers: int = 5) -> st.SearchStrategy[Graph]:
    """Layers drawn at random, forward and backward."""
    return SEEDS.map(partial(random_graph, layers=layers))


def small_graphs() -> st.SearchStrategy[Graph]:
    """Graphs of 2 to 5 operators, for proofs by trying everything."""
    return SEEDS.map(small_graph)


def assignments(graph: Graph, where: Machine, again: float = 0.0) -> st.SearchStrategy[Assignment]:
    """Legal assignments of a graph; of the operators that may run twice a share of ``again`` does."""
    return SEEDS.map(lambda seed: random_assignment(graph, where, seed, again))


def schedules() -> st.SearchStrategy[Schedule]:
    """See ``any_schedule``."""
    return SEEDS.map(any_schedule)


def plans() -> st.SearchStrategy[Plan]:
    """Plans of such schedules, as if a search had found them."""
    return schedules().map(plan_of)


def problems(most_nodes: int = 6, most_choices: int = 4) -> st.SearchStrategy[Problem]:
    """Small problems with whatever is awkward: see ``random_problem``."""
    return SEEDS.map(partial(random_problem, most_nodes=most_nodes, most_choices=most_choices))


def pipelines(
    layers: int = 8, devices: int = 4, microbatches: int = 5, *, chunked: bool = True, modes: bool = True
) -> st.SearchStrategy[PipelineProblem]:
    """Small chains to be cut, with whatever is awkward: see ``random_pipeline``. Without ``chunked`` one chunk a device."""
    return SEEDS.map(partial(random_pipeline, layers=layers, devices=devices, microbatches=microbatches)).filter(
        lambda problem: (chunked or problem.chunks == 1) and (modes or all(len(layer) == 1 for layer in problem.layers))
    )


@st.composite
def view_shapes(choose: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements."""
    primes = choose(st.lists(st.sampled_from([2, 2, 2, 3]), max_size=5))
    sides = []
    for order in (primes, choose(st.permutations(primes))):
        cuts = choose(st.lists(st.booleans(), min_size=len(primes), max_size=len(primes)))
        sides.append(_grouped(list(order), cuts, choose(st.lists(st.integers(0, 5), max_size=1))))
    return sides[0], sides[1]


def _grouped(primes: list[int], cuts: list[bool], units: list[int]) -> list[int]:
    """Dims whose product is that of the primes, with some dims of size 1 among them."""
    dims = [1]
    for prime, cut in zip(primes, cuts, strict=True):
        if cut:
            dims.append(prime)
        else:
            dims[-1] *= prime
    for place in units:
        dims.insert(place % (len(dims) + 1), 1)
    return dims

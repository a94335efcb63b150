"""Inputs split over the batch where that costs next to nothing: what a rank need not see, its loader need not load.

A few ids are soon sent to all ranks, and labels soon counted on all: what that saves is less than the gap at which a search stops. After
it, inputs that are whole on every rank, and what is computed of them in whole numbers, are chosen anew around the plan with those inputs
split; the answer is taken if it fits in memory, and its step is at most ``SHARE`` longer; a plan that was proved optimal stays optimal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace

import numpy as np

from autopar.graph import Graph
from autopar.schedule import AGAIN, OUTPUT, Assignment
from autopar.search.exposure import Exposure
from autopar.search.extract import extract
from autopar.search.fitting import choices_of
from autopar.search.folded import FoldedModel
from autopar.search.trials import PROOF, Trials
from autopar.search.tuning import EQUAL, Timed
from autopar.sharding import ShardingSpec
from solvers import INFINITE

SHARE = 5e-4
"""Relative increase of the step that split inputs are worth."""
SECONDS = 2.0
"""For one solve, in which nearly all is decided."""
WHOLE_NUMBERS = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"})


def split_inputs(search: Trials) -> Timed | None:
    """The best plan with fewer inputs whole on every rank: all of them split, or as many as may be one by one; None where none may."""
    best, space = search.best, search.model.space
    if best is None or search.interrupted or search.draft or space.machine.cost_model == "communication":
        return None
    if len(best.assignment.strategies) != len(space.graph.ops):
        return None  # of the whole graph, where this one is folded
    whole = _whole(space.graph, best.assignment) - set(space.pins.inputs)
    share = EQUAL if search.reached <= PROOF else SHARE
    rivals = (rival.seconds for rival in search.rivals if rival.memory.peak <= search.limit)
    most, found = min([best.seconds * (1 + share), *rivals]), None
    together = [frozenset(whole)] if len(whole) > 1 else []
    for some in (*together, *(frozenset([name]) for name in sorted(whole))):
        for finest in (True, False):
            if search.left > 0 and whole >= some:
                made = _split(search, found or best, some, most, finest)
                found, whole = (found, whole) if made is None else (made, whole - some)
    return found


def _split(search: Trials, begin: Timed, inputs: frozenset[str], most: float, finest: bool) -> Timed | None:
    """A plan with some inputs split by rows, and the rest as it is; None where it takes more seconds than ``most``.

    Args:
        finest: whether they must be split as finely as may be.
    """
    model, given = search.model, begin.assignment
    space, graph = model.space, model.space.graph
    opened = _of_whole_numbers(graph, inputs)
    touched = inputs | {tensor for name in opened for tensor in graph.op[name].outputs}
    if opened & given.again:
        return None
    kept = replace(
        given, inputs={name: spec for name, spec in given.inputs.items() if name not in inputs},
        strategies={name: strategy for name, strategy in given.strategies.items() if name not in opened},
    )  # fmt: skip
    problem, _ = model.problem(None, Exposure.first(search.slowdown).learn(begin.schedule, begin.slots))
    costs = problem.costs.copy()
    for place, number in enumerate(model.restrict(np.arange(len(model.nodes)))):
        node = model.nodes[number]
        if node.kind == "input" and node.name in inputs:
            parts = [_parts(spec, space.sizes) for spec in node.specs]
            least = max(parts) if finest else 2
            costs[problem.node_ptr[place] : problem.node_ptr[place + 1]][[count < least for count in parts]] = INFINITE
    seconds = max(min(search.left, SECONDS), 0.1)
    choices = choices_of(model, replace(problem, costs=costs), kept, search.seed, gap=0.0, seconds=seconds)
    if choices is None:
        return None
    made = _with(graph, given, extract(model, model.expand(choices)), touched)
    if isinstance(model, FoldedModel) and not model.fold.agrees(made):
        return None
    found = search.finished(search.exact(replace(begin, assignment=made)))
    return found if found.memory.peak <= search.limit and found.seconds <= most else None


def _whole(graph: Graph, assignment: Assignment) -> set[str]:
    """The inputs with several rows that are whole on every rank."""
    shapes = {item.tensor: graph.tensors[item.tensor].shape for item in graph.of_kind("input")}
    return {name for name, shape in shapes.items() if shape and shape[0] > 1 and assignment.inputs[name].is_replicated}


def _parts(spec: ShardingSpec, sizes: Sequence[int]) -> int:
    """In how many parts the rows are split, if nothing else is."""
    return 1 if any(spec.dims[1:]) else math.prod(sizes[axis] for axis in spec.dims[0])


def _of_whole_numbers(graph: Graph, inputs: Set[str]) -> set[str]:
    """The operators that compute whole numbers of some inputs, directly or of others such."""
    made, found = set(inputs), set[str]()
    for op in graph.ops:
        if made.intersection(op.inputs) and all(graph.tensors[tensor].dtype in WHOLE_NUMBERS for tensor in op.outputs):
            made.update(op.outputs)
            found.add(op.name)
    return found


def _with(graph: Graph, given: Assignment, other: Assignment, touched: Set[str]) -> Assignment:
    """An assignment with what another says of some tensors: their specs, who makes them how, and their reshards. Second runs read what the
    first do."""

    def reads(reader: str, position: int) -> bool:
        if reader.startswith(OUTPUT):
            return graph.outputs[int(reader.removeprefix(OUTPUT))].tensor in touched
        return graph.op[reader.removesuffix(AGAIN)].inputs[position] in touched

    makers = {graph.producer[tensor].name for tensor in touched if tensor in graph.producer}
    read = {key: value for key, value in (other.reads or {}).items() if reads(*key)}
    again = [(name, position) for name in given.again for position, tensor in enumerate(graph.op[name].inputs) if tensor in touched]
    return replace(
        given, inputs={name: (other if name in touched else given).inputs[name] for name in given.inputs},
        strategies={name: (other if name in makers else given).strategies[name] for name in given.strategies},
        layouts=(
            *(layout for layout in given.layouts if layout.tensor not in touched),
            *(layout for layout in other.layouts if layout.tensor in touched),
        ),
        reads={
            **{key: value for key, value in (given.reads or {}).items() if not reads(*key)},
            **read,
            **{(name + AGAIN, position): read[name, position] for name, position in again if (name, position) in read},
        },
    )  # fmt: skip

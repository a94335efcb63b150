"""The deferred loss: its call is waited for when the loss is read.

The loss of a training step is a sum over ranks that backward does not need. The wait for its call is deferred until the loss is read
(``Instruction.late``), and so are the few operators that make the loss from it. No call starts there: the order of calls stays the same on
all ranks. Their sources and results outlive forward, and so must be small.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from autopar import pricing
from autopar.rules import why_once
from autopar.schedule.assignment import FORWARD, OUTPUT
from autopar.schedule.settings import DEFERRED_LEAST_BYTES, DEFERRED_MOST_BYTES, DEFERRED_SHARE

if TYPE_CHECKING:
    from autopar.cost_models import Machine
    from autopar.graph import Graph, Op
    from autopar.schedule.assignment import Assignment
    from autopar.sharding import ShardingSpec


def may_be_deferred(graph: Graph) -> frozenset[str]:
    """The operators of ``graph.tail`` that may run when the loss is read, and its output, by name.

    None of them draws at random or reads the user's own tensors, which an optimizer may change meanwhile.
    """
    given, found = {item.tensor for item in graph.inputs}, set[str]()
    for op in graph.tail:
        if given.isdisjoint(op.inputs) and not why_once(op) and graph.readers(op) <= found:
            found.add(op.name)
    return frozenset(found) if graph.loss is None else frozenset(found | {f"{OUTPUT}{graph.loss}"})


def deferred_values(graph: Graph, assignment: Assignment, machine: Machine) -> frozenset[str]:
    """The reshards, by value, whose last collective is deferred; none under the communication model, where nothing overlaps."""
    ends = may_be_deferred(graph) if machine.overlaps else frozenset()
    made = {layout.value: layout for layout in assignment.layouts if layout.half == FORWARD and layout.before in ends}
    if not made:
        return frozenset()
    sources = {layout.source for layout in assignment.layouts}
    late: list[Op] = []
    for op in graph.tail:
        free = sources.isdisjoint(op.outputs) and not assignment.strategies[op.name].inner
        if op.name in ends and free and graph.readers(op) <= {other.name for other in late}:
            late.append(op)
    ends = ends.difference(op.name for op in graph.tail if op not in late)
    reads = assignment.reads or {}
    found = set(made) - sources
    found -= {value for (reader, _), value in reads.items() if value in made and reader not in ends}
    held = {(made[value].tensor, made[value].spec) for value in found}
    for op in late:
        strategy = assignment.strategies[op.name]
        held.update(zip((*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs), strict=True))
    entering = ((item.tensor, assignment.inputs[item.tensor]) for item in graph.inputs)
    kept = _bytes(held, graph, machine)
    return frozenset(found) if kept <= DEFERRED_LEAST_BYTES or kept <= _allowed(_bytes(entering, graph, machine)) else frozenset()


def most_deferred_bytes(graph: Graph) -> float:
    """Bytes that no late reshard of a graph makes more of, however its inputs lie."""
    return _allowed(sum(graph.tensors[item.tensor].bytes for item in graph.inputs))


def _allowed(entering: int) -> float:
    return min(max(DEFERRED_LEAST_BYTES, DEFERRED_SHARE * entering), DEFERRED_MOST_BYTES)


def _bytes(held: Iterable[tuple[str, ShardingSpec]], graph: Graph, machine: Machine) -> int:
    return sum(pricing.local_bytes(graph.tensors[tensor], spec, machine) for tensor, spec in held)

"""Rows that are dispatched to experts: which values hold them, what their numbers depend on, and which operator asks for these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from autopar.graph import COMBINE, DISPATCHES, Graph, Op, Tensor
from autopar.rules.lookup import find_rule
from autopar.sharding import Strategy


def find_dispatched(graph: Graph) -> frozenset[str]:
    """The values ``[experts, columns, ...]`` that hold dispatched rows. A rank with some of the experts has as many rows as chose these, so
    that no collective cuts or joins them: readers take such a value as it is made."""
    found: set[str] = set()
    for op in graph.ops:
        found.update(dispatched_results(op, graph.tensors, found))
    return frozenset(found)


def dispatched_results(op: Op, tensors: Mapping[str, Tensor], dispatched: Set[str]) -> Iterator[str]:
    """The results of an operator that hold dispatched rows, where some of its inputs do."""
    if op.target in DISPATCHES:
        yield from op.outputs
    elif op.target != COMBINE and not dispatched.isdisjoint(op.inputs):
        rule = find_rule(op, tensors)
        leads = {rule.inputs[place][:2] for place, name in enumerate(op.inputs) if name in dispatched}
        yield from (name for name, dims in zip(op.outputs, rule.outputs, strict=True) if dims[:2] in leads)


def find_askers(ops: Iterable[Op]) -> frozenset[str]:
    """The dispatches and combines that are the first of their phase to read their choices, by name.

    They find out which rows are at hand, and the runtime keeps that for the others (``runtime.instructions.expert_exchange``).

    Args:
        ops: in the order of a graph.
    """
    first: dict[tuple[str, str], str] = {}
    for op in ops:
        if op.target in (*DISPATCHES, COMBINE):
            first.setdefault((op.phase, _choices_of(op)), op.name)
    return frozenset(first.values())


def _choices_of(op: Op) -> str:
    """The experts of choices that an operator reads: the only input of ``dispatch_ids``, else the second."""
    return op.inputs[min(1, len(op.inputs) - 1)]


def splits_experts(op: Op, strategy: Strategy) -> bool:
    """Whether ranks have the rows of some experts alone, as many as chose them: sizes that values decide."""
    dispatched = strategy.outputs[0] if op.target in DISPATCHES else strategy.inputs[0] if op.target == COMBINE else None
    return dispatched is not None and bool(dispatched.dims[0])

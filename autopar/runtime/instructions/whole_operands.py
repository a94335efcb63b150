"""Operators that are told when a rank holds all of what may be split: tables that are looked up, and experts.

An offset says which part of the whole a rank holds, and costs kernels that find out what belongs to that part. ``WHOLE`` in its place says
that all does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.dialect import dispatch, experts
from autopar.dialect.library import WHOLE
from autopar.dialect.lookup import OFFSETS
from autopar.graph import Graph, Op, Tensor
from autopar.rules import count_entries, ignored_number, looked_up

FIRST_EXPERT = {"autopar.expert_contract.default": experts.FIRST_EXPERT, **dispatch.FIRST_EXPERT}
"""Operators whose rows are of experts, with the position of the first one at hand, behind the number of experts."""


def mark_whole(op: Op, graph: Graph, args: Sequence[Any], shapes: Sequence[Sequence[int]]) -> Sequence[Any]:
    """An operator's arguments on a rank, with ``WHOLE`` for an offset where the rank holds all.

    Args:
        args, shapes: its arguments and the shapes of its inputs on this rank.
    """
    if op.target in FIRST_EXPERT:
        place = FIRST_EXPERT[op.target]
        whole = args[place - 1] == op.args[place - 1]
    elif op.target in OFFSETS:
        whole, place = _holds_table(op, graph, args, shapes), OFFSETS[op.target]
    else:
        return args
    return [WHOLE if index == place else item for index, item in enumerate(args)] if whole else args


def _holds_table(op: Op, graph: Graph, args: Sequence[Any], shapes: Sequence[Sequence[int]]) -> bool:
    """Whether the rank holds every entry, and each index is one of the table or wrong: of a gradient, what forward looked up."""
    held = Tensor(op.inputs[0], tuple(shapes[0]), graph.tensors[op.inputs[0]].dtype)
    entries = count_entries(op, graph.tensors)
    if count_entries(replace(op, args=tuple(args)), {held.name: held}) != entries:
        return False
    lookup = looked_up(op)
    if lookup is not None and lookup.entries:
        return not of_class_weights(op, graph)
    return any(
        other.inputs[1:2] == op.inputs[1:2] and count_entries(other, graph.tensors) == entries and not of_class_weights(other, graph)
        for other in graph.ops
        if (found := looked_up(other)) is not None and found.entries and other.phase == "forward"
    )


def of_class_weights(op: Op, graph: Graph) -> bool:
    """Whether it looks up the weights of classes that a loss looks up itself: a class that the loss ignores has none."""
    maker, losses = graph.producer.get(op.inputs[0]), (other for other in graph.ops if ignored_number(other) is not None)
    unsqueezed = maker is not None and maker.target.startswith("aten.unsqueeze")
    return ignored_number(op) is None and unsqueezed and any(other.inputs[1] == op.inputs[1] for other in losses)

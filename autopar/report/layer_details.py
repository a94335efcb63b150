"""What the page tells of one layer: its operators and collectives by group, how its weights lie, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.compare.explanation import Explanation
from autopar.graph import layer_of
from autopar.plan import Plan
from autopar.report.parallelism_words import Way
from autopar.rows import CollectivePlan

REASONS = 200
"""Ways that are explained, at most: more would be most of the page."""
OUTSIDE = "outside the modules"
"""The group of operators that stand in no submodule."""


def group_of(module: str) -> str:
    """The layer of a module, or the module where it is of none.

    >>> group_of("model.layers.3.mlp"), group_of("head"), group_of("")
    ('model.layers.3', 'head', 'outside the modules')
    """
    return layer_of(module) or module or OUTSIDE


class Groups:
    """Which group each operator and collective is of. A collective is of the layer whose operator reads its result, else of the one that
    makes what it moves."""

    def __init__(self, plan: Plan) -> None:
        self._ops = {row.name: group_of(row.module) for row in plan.ops}
        self._makers = {entry.tensor: self._ops[row.name] for row in plan.ops for entry in row.outputs}
        self._makers |= {row.tensor: group_of(name.rpartition(".")[0]) for name, row in plan.parameters.items()}
        self._calls = {row.id: self._of_call(row) for row in plan.collectives if row.id is not None}

    def of(self, name: str) -> str:
        """The group of an operator or a collective, by the name that instructions have for it."""
        return self._ops.get(name) or self._calls.get(name) or OUTSIDE

    def _of_call(self, row: CollectivePlan) -> str:
        part = row.members[0]
        return self._ops.get(part.before) or self._makers.get(part.tensor) or OUTSIDE


def ways_by_group(rows: Sequence[Way]) -> Mapping[str, list[int]]:
    """By group, the places of the ways in which its weights and attentions lie."""
    found: dict[str, list[int]] = {}
    for place, way in enumerate(rows):
        for name in way.layers:
            group = layer_of(name) or group_of(name.rpartition(".")[0] if way.is_weight else name)
            if place not in found.setdefault(group, []):
                found[group].append(place)
    return found


def reasons(plan: Plan, rows: Sequence[Way]) -> list[str]:
    """For each way of weights, what ``autopar explain`` says of its first layer; empty for attentions and beyond ``REASONS``."""
    explanation = Explanation(plan)
    found = []
    for place, way in enumerate(rows):
        explanation.told.clear()
        found.append("\n".join(explanation.tell(f"parameter:{way.layers[0]}")) if way.is_weight and place < REASONS else "")
    return found

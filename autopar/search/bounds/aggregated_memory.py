"""A bound where memory is short: one rank with the memory of all, on which every operator takes as long as it does at best on the mesh.

Between forward and backward something of all that backward needs is there, or is made again. Whatever a tensor is split like, the parts on
all ranks come to the whole tensor at least, and together they have the limit times the number of ranks; and an operator's second run takes
as long as its fastest strategy at least. So what the cheapest plan of that one rank takes, without collectives, bounds the step of every
plan in every order, those with second runs included. Memory at that moment is paid for: see ``renting``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopar.effort import Budget
from autopar.search.bounds.memory_dual import lagrangian_bound
from autopar.search.bounds.surrogate import Master
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.folding.fold import Folding
from autopar.search.folding.tied_model import folded
from autopar.search.ilp.build import build_model
from autopar.search.ilp.model import Model, Node
from cost_models import Machine, Mesh


def pooled(space: Space, folding: Folding | None, limit: int, budget: Budget) -> float:
    """Seconds below which no plan in ``limit`` bytes a rank stays.

    Args:
        space: of the folded graph where equal layers are folded.
        budget: what it may spend; 0 is what it gives without an answer.
    """
    total = float(limit * math.prod(space.sizes))
    model = _alone(space)
    tied = folded(model, folding) if folding is not None else model
    assert tied is not None, "on one rank all layers are offered the same"
    middle = sum(op.phase == "forward" for op in space.graph.ops)
    return max(lagrangian_bound(tied, Master(tied, 0.0).first(), total, (middle,), budget), 0.0)


def _alone(space: Space) -> Model:
    """The model of one rank on which operators take as long as at best on the mesh, all of forward that may run twice allowed to."""
    mesh = Mesh(tuple((name, 1) for name in space.machine.mesh.names))
    machine = Machine(mesh, space.machine.hardware, space.machine.cost_model)
    model = build_model(Space(space.graph, machine, space.optimizer, Pins({}, {}, {})), again=1, share=0.0)
    least = {op.name: float(space.op_choices(op).seconds.min()) for op in space.graph.ops}
    given = {item.tensor: float(space.input_seconds(item, space.input_specs(item)).min()) for item in space.graph.inputs}

    def best(node: Node) -> Node:
        runs = np.ones(len(node.seconds)) if node.picks is None else (node.picks >= 0).astype(float)
        return replace(node, seconds=runs * {"input": given, "op": least, "again": least}.get(node.kind, {}).get(node.name, 0.0))

    return replace(model, nodes=[best(node) for node in model.nodes])

"""Aggregated-memory bound, for short memory: one rank with the memory of all ranks, and each operator as fast as it can be on the mesh.

Between forward and backward, everything that backward needs is kept or will be recomputed. The parts of a tensor on all ranks sum to the
whole tensor at least. All ranks together have the limit times their number. A recomputed operator takes its fastest strategy at least.

So the cheapest plan of that one rank, without collectives, bounds the step of every plan in every order, with or without recomputation.
Memory at that moment has a Lagrangian price (``memory_dual``).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopar.cost_models import Machine, Mesh
from autopar.effort import Budget
from autopar.search.bounds.memory_dual import lagrangian_bound
from autopar.search.bounds.surrogate import Master
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.folding.fold import Folding
from autopar.search.folding.tied_model import tie_model
from autopar.search.ilp.build import build_model
from autopar.search.ilp.model import Model, Node


def aggregated_memory_bound(space: Space, folding: Folding | None, limit: int, budget: Budget) -> float:
    """Seconds that no plan within ``limit`` bytes per rank can beat; 0 without a solution.

    Args:
        space: of the folded graph where equal layers are folded.
        budget: work of all solves.
    """
    total = float(limit * math.prod(space.sizes))
    model = _one_rank_model(space)
    tied = tie_model(model, folding) if folding is not None else model
    assert tied is not None, "on one rank all layers are offered the same"
    middle = sum(op.phase == "forward" for op in space.graph.ops)
    return max(lagrangian_bound(tied, Master(tied, 0.0).first_weights(), total, (middle,), budget), 0.0)


def _one_rank_model(space: Space) -> Model:
    """The model of that one rank: fastest seconds of each operator, and recomputation of every forward operator that may run twice."""
    mesh = Mesh(tuple((name, 1) for name in space.machine.mesh.names))
    machine = Machine(mesh, space.machine.hardware, space.machine.cost_model, space.machine.execution)
    model = build_model(Space(space.graph, machine, space.optimizer, Pins({}, {}, {})), recompute_times=1, small_share=0.0)
    least = {op.name: float(space.op_choices(op).seconds.min()) for op in space.graph.ops}
    given = {item.tensor: float(space.input_seconds(item, space.input_specs(item)).min()) for item in space.graph.inputs}

    def best(node: Node) -> Node:
        runs = np.ones(len(node.seconds)) if node.strategy_numbers is None else (node.strategy_numbers >= 0).astype(float)
        seconds = {"input": given, "op": least, "recompute": least}.get(node.kind, {}).get(node.name, 0.0)
        return replace(node, seconds=runs * seconds, once=None)

    return replace(model, nodes=[best(node) for node in model.nodes])

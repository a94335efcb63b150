"""A bound where memory is short: one rank with the memory of all, on which every operator takes as long as it does at best on the mesh.

Between forward and backward something of all that backward needs is there, or is made again. Whatever a tensor is split like, the parts on
all ranks come to the whole tensor at least, and together they have the limit times the number of ranks; and an operator's second run takes
as long as its fastest strategy at least. So what the cheapest plan of that one rank takes, without collectives, bounds the step of every
plan in every order, those with second runs included. How far memory at that moment is worth its price in seconds (a Lagrange multiplier) is
searched; for any price the bound holds, and equal layers are cut apart as in ``folded``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.building import build_model
from autopar.search.folded import FoldedModel, folded
from autopar.search.folding import Folding
from autopar.search.model import TIES, Model, Node, Priced
from autopar.search.pins import Pins
from autopar.search.space import Space
from cost_models import Machine, Mesh
from solvers import solve

SECONDS = 5.0
"""For one solve."""
CLOSE = 1e-4
"""The gap at which it stops."""


@dataclass(frozen=True)
class Rented:
    """As ``Weights``: all seconds, and what is held at one time of the problem at a price.

    Args:
        seconds: of a byte.
    """

    seconds: float
    time: int

    def price(self, model: Model) -> Priced:
        nodes = [node.seconds + self.seconds * _held(node, self.time) for node in model.nodes]
        return Priced(nodes, [edge.seconds for edge in model.edges])


def _held(node: Node, time: int) -> np.ndarray:
    """Bytes of each choice at a time."""
    return np.array([float(sum(size for begin, end, size in items if begin <= time < end)) for items in node.items])


def pooled(space: Space, folding: Folding | None, limit: int) -> float:
    """Seconds below which no plan in ``limit`` bytes a rank stays.

    Args:
        space: of the folded graph where equal layers are folded.
    """
    total = float(limit * math.prod(space.sizes))
    model = _alone(space)
    tied = folded(model, folding) if folding is not None else model
    assert tied is not None, "on one rank all layers are offered the same"
    middle = sum(op.phase == "forward" for op in space.graph.ops)
    prices = sorted({price for node in tied.nodes if node.kind == "again" for price in _worth(tied, node) if price > 0.0})
    low, high, known = 0, len(prices) - 1, dict[int, float]()

    def bound(place: int) -> float:
        if place not in known:
            known[place] = _bound(tied, Rented(prices[place], middle)) - prices[place] * total
        return known[place]

    while low < high:  # concave in the price
        between = (low + high) // 2
        if bound(between) < bound(between + 1):
            low = between + 1
        else:
            high = between
    return max([bound(place) for place in range(max(low - 1, 0), min(low + 2, len(prices)))], default=0.0)


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


def _worth(model: Model, node: Node) -> list[float]:
    """Seconds a byte that it takes to make the results of an operator again, alone: prices at which what is kept may change."""
    op = model.space.graph.op[node.name]
    sizes = [model.space.graph.tensors[tensor].bytes for tensor in op.outputs]
    return [float(node.seconds.max()) / sum(sizes)] if sum(sizes) else []


def _bound(model: Model, weights: Rented) -> float:
    problem, unit = model.problem(None, weights)
    found = solve(problem, time_limit=SECONDS, gap=CLOSE)
    bound = found.bound * unit / (1 + TIES)
    if isinstance(model, FoldedModel) and found.objective is not None:
        return model.proved(weights, bound, found.objective * unit, SECONDS)
    return bound

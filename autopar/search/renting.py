"""A bound where memory is short: what is held at one time of the problem is paid for (a Lagrange multiplier on the limit there).

For any price of a byte, the least of weighted seconds (``bounds``) and rent together, less the rent of all that is allowed, bounds the step
of every plan that fits. The best price is where the tangents that answers give meet: as a function of the price the least is concave.
Rents are costs of nodes alone, so that equal layers are cut apart as in ``folded``, where limits could not be.

Plans with second runs are to be among all plans, but which strategy an operator has when it runs again would make a problem too large:
here it takes as long as its fastest, and what it reads is gathered for nothing (``lightly_again``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from autopar.search.fitting import counted
from autopar.search.model import TIES, Model, Node, Priced, Weights
from solvers import Problem, solve

SECONDS = 5.0
"""For one solve."""
CLOSE = 1e-4
"""The gap at which it stops."""
ASKED = 10
"""Prices tried, at most."""
FIRST, FURTHER = 0.02, 4.0
"""The first price, as the share of the seconds that renting all that is allowed costs, and the step to the next."""
GAIN = 1e-3
"""Relative gain for which no other price is tried."""


@dataclass(frozen=True)
class Rented:
    """As ``Weights``: those of others, and what is held at one time of the problem at a price.

    Args:
        seconds: of a byte.
    """

    weights: Weights
    seconds: float
    time: int

    def price(self, model: Model) -> Priced:
        priced = self.weights.price(model)
        rents = [self.seconds * held(node, self.time) for node in model.nodes]
        return Priced([table + rent for table, rent in zip(priced.nodes, rents, strict=True)], priced.edges)


def held(node: Node, time: int) -> np.ndarray:
    """Bytes of each choice at a time."""
    return np.array([float(sum(size for begin, end, size in items if begin <= time < end)) for items in node.items])


@dataclass(frozen=True)
class _Tangent:
    """What one price says: the bound there, and the line on or below which the best bound for any price lies.

    Args:
        least: seconds and rent of the answer.
        slope: bytes of the answer beyond what is allowed.
    """

    price: float
    bound: float
    least: float
    seconds: float
    slope: float


def dearest(model: Model, weights: Weights, allowed: float, time: int, until: float = math.inf) -> float:
    """The best bound found on the step of every plan that holds at most ``allowed`` bytes at a time; 0 without any.

    Args:
        until: the ``perf_counter`` from which no other price is tried.
    """
    at = _ask(model, weights, 0.0, allowed, time)
    if at is None or at.slope <= 0.0:
        return at.bound if at is not None else 0.0
    known = [at]
    price = FIRST * at.seconds / allowed
    while len(known) < ASKED and perf_counter() < until:
        at = _ask(model, weights, price, allowed, time)
        if at is None:
            break
        known.append(at)
        below = max((one for one in known if one.slope > 0.0), key=lambda one: one.price)
        above = min((one for one in known if one.slope <= 0.0), key=lambda one: one.price, default=None)
        if above is None:
            price *= FURTHER
            continue
        price = (above.seconds - below.seconds) / (below.slope - above.slope)
        if below.seconds + price * below.slope <= max(one.bound for one in known) * (1 + GAIN):
            break
    best = max(known, key=lambda one: one.bound)
    return model.proved(Rented(weights, best.price, time), best.bound + best.price * allowed, best.least, SECONDS) - best.price * allowed


def _ask(model: Model, weights: Weights, price: float, allowed: float, time: int) -> _Tangent | None:
    """None without an answer."""
    problem, unit = model.problem(None, Rented(weights, price, time))
    found = solve(problem, time_limit=SECONDS, gap=CLOSE)
    if found.choices is None or found.objective is None:
        return None
    choices = model.expand(found.choices)
    bytes_held = sum(
        times * float(held(node, time)[choice]) for times, node, choice in zip(model.node_times, model.nodes, choices, strict=True)
    )
    least = found.objective * unit
    return _Tangent(price, found.bound * unit / (1 + TIES) - price * allowed, least, least - price * bytes_held, bytes_held - allowed)


def fullest(model: Model, problem: Problem, choices: np.ndarray) -> int:
    """The time at which an answer holds most, of those at which rents can be charged.

    Args:
        problem: of ``model``.
        choices: one for each of the model's nodes.
    """
    levels = counted(problem, model.restrict(choices), max(model.times.values(), default=0) + 1)
    return max((time for time in range(len(levels)) if model.rests(time)), key=lambda time: int(levels[time]), default=0)


def lightly_again(model: Model) -> Model:
    """The model with two choices for each second run, not and in the fastest strategy, whose reads take no time: what it asks of a plan is
    no more. What has collectives inside stays as it is: how they hold links depends on the strategy."""
    light = {number for number, node in enumerate(model.nodes) if node.kind == "again" and not model.node_loads(node)}

    def fastest(node: Node) -> Node:
        assert node.picks is not None
        return replace(node, seconds=np.array([0.0, float(node.seconds[node.picks >= 0].min())]), picks=np.array([-1, 0]), items=[[], []])

    def together(table: np.ndarray) -> np.ndarray:
        """Of rows the first, and what any of the others allows."""
        return np.stack([table[0], table[1:].any(axis=0)])

    edges = []
    for edge in model.edges:
        if edge.source in light or edge.target in light:
            allowed = np.isfinite(edge.seconds)
            allowed = together(allowed) if edge.source in light else allowed
            allowed = together(allowed.T).T if edge.target in light else allowed
            if not allowed.all():
                table = np.where(allowed, 0.0, np.inf)
                edges.append(replace(edge, seconds=table, tensor=None, sources=(), targets=(), readers=1))
        else:
            edges.append(edge)
    return replace(model, nodes=[fastest(node) if number in light else node for number, node in enumerate(model.nodes)], edges=edges)

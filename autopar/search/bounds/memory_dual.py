"""Lagrangian bound where memory is short: bytes held at several times of the problem have a price.

For any surrogate weights (``surrogate``) and any prices of a byte, take the least sum of weighted seconds and priced bytes. Less the price
of the allowed bytes, it bounds the step of every plan that fits.

Cutting planes find weights and prices together. Weights found without a limit do not do: recomputation lengthens other sums. Prices are
costs of nodes alone, so equal layers decompose as in ``tied_model``, which a memory limit would prevent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from autopar.effort import Budget
from autopar.search.bounds.surrogate import Answer, Master, Multipliers, blend
from autopar.search.ilp.model import Model, Node, Priced, Weights
from autopar.search.settings import (
    DUAL_GAIN,
    DUAL_PRICE_SHARE,
    DUAL_ROUNDS,
    DUAL_SOLVE_MOST,
    DUAL_SOLVE_WORK,
    DUAL_STEP,
    DUAL_STEP_DECAY,
    DUAL_STEP_LEAST,
    FIRST_PRICE_SHARE,
    IDLE_ROUNDS,
    PRICE_CEILING,
    PRICE_GROWTH,
    TIES,
)
from autopar.search.solving import solve
from solvers import Status


@dataclass(frozen=True)
class MemoryPriced:
    """The ``Weights`` of another pricing, with a price on the bytes held at some times.

    Args:
        prices: seconds per byte, by time of the problem.
    """

    weights: Weights
    prices: Mapping[int, float]

    def price(self, model: Model) -> Priced:
        priced = self.weights.price(model)
        nodes = list(priced.nodes)
        for time, seconds in self.prices.items():
            for number, node in enumerate(model.nodes):
                nodes[number] = nodes[number] + seconds * model.once(("held", number, time), partial(held, node, time))
        return Priced(nodes, priced.edges)


def held(node: Node, time: int) -> np.ndarray:
    """Bytes that each choice of a node holds at a time; shape [choices]."""
    return np.array([float(sum(size for begin, end, size in items if begin <= time < end)) for items in node.items])


@dataclass(frozen=True)
class _Asked:
    """One solve: its weights and prices, the bound on steps that it proves, and its choices.

    Args:
        least: weighted seconds and priced bytes of the choices, in seconds.
    """

    weights: Multipliers
    prices: Mapping[int, float]
    bound: float
    least: float
    choices: np.ndarray


def lagrangian_bound(
    model: Model, weights: Multipliers, allowed: float, times: Sequence[int], budget: Budget, enough: float = 0.0
) -> float:
    """The best bound found, in seconds, on the step of every plan that holds at most ``allowed`` bytes at ``times``; 0 without any.

    Args:
        weights: the first weights, without paths.
        times: times of the problem at which bytes may have a price.
        budget: work of all solves.
        enough: relative gain below which no other price is tried.
    """
    cuts = Master(model, weights.slowdown, allowed, times)
    best: _Asked | None = None
    prices: Mapping[int, float] = {}
    within = math.inf
    idle, still, seconds, asking = 0, 0, DUAL_SOLVE_WORK, budget.share(DUAL_PRICE_SHARE)
    while len(cuts.answers) < DUAL_ROUNDS and still < IDLE_ROUNDS and (left := asking.left) > 0:
        problem, unit = model.problem(None, MemoryPriced(weights, prices))
        found = solve(problem, asking.at_most(seconds), gap=DUAL_GAIN, patient=False)
        if found.choices is None or found.objective is None:
            if found.status is Status.INFEASIBLE or seconds >= min(DUAL_SOLVE_MOST, left):
                break
            seconds = min(2 * seconds, DUAL_SOLVE_MOST)
            continue
        charged = allowed * sum(prices.values())
        choices = model.expand(found.choices)
        asked = _Asked(weights, prices, found.bound * unit / (1 + TIES) - charged, found.objective * unit, choices)
        idle = 0 if best is None or asked.bound > best.bound * (1 + DUAL_GAIN) else idle + 1
        best = asked if best is None or asked.bound > best.bound else best
        cuts.add(Answer(model, choices))
        if not prices and cuts.beyond[-1].max() <= 0.0:
            break
        highest = max(FIRST_PRICE_SHARE * best.least / allowed, PRICE_GROWTH * sum(best.prices.values()))
        wanted, most, dear = cuts.best(highest)
        bounded = sum(dear.values()) > PRICE_CEILING * highest  # the cap on prices binds: above it they may reach more than ``most``
        if most <= best.bound * (1 + (DUAL_GAIN if bounded else max(enough, DUAL_GAIN))):
            break
        still = 0 if idle == 0 or most < within * (1 - DUAL_GAIN) else still + 1
        within = min(within, most)
        share = max(DUAL_STEP * DUAL_STEP_DECAY**idle, DUAL_STEP_LEAST)
        weights = blend(wanted, best.weights, share)
        prices = {time: share * price + (1 - share) * best.prices.get(time, 0.0) for time, price in dear.items()}
    if best is None:
        return 0.0
    charged = allowed * sum(best.prices.values())
    rented = MemoryPriced(best.weights, best.prices)
    return model.proved(rented, best.bound + charged, best.least, budget.at_most(DUAL_SOLVE_MOST), best.choices) - charged

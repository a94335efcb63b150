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
from autopar.search.bounds.surrogate import Evaluation, Master, Multipliers, blend
from autopar.search.ilp.model import Model, Node, Priced, Weights
from autopar.search.settings import (
    DUAL_GAIN,
    DUAL_PRICE_SHARE,
    DUAL_RANGE,
    DUAL_STEP,
    DUAL_STEP_DECAY,
    FIRST_PRICE_SHARE,
    IDLE_ROUNDS,
    PRICE_GROWTH,
    ROUNDS,
    SOLVE_WORK,
    TIES,
)
from autopar.search.solving import solve


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
                nodes[number] = nodes[number] + seconds * model.cached(("held", number, time), partial(bytes_held, node, time))
        return Priced(nodes, priced.edges)


def bytes_held(node: Node, time: int) -> np.ndarray:
    """Bytes that each choice of a node holds at a time; shape [choices]."""
    return np.array([float(sum(size for begin, end, size in items if begin <= time < end)) for items in node.items])


@dataclass(frozen=True)
class _PricedSolve:
    """One solve: its weights and prices, the bound on steps that it proves, and its choices.

    Args:
        least: weighted seconds and priced bytes of the choices, in seconds.
    """

    weights: Multipliers
    prices: Mapping[int, float]
    bound: float
    least: float
    choices: np.ndarray


def lagrangian_bound(model: Model, weights: Multipliers, allowed: float, times: Sequence[int], budget: Budget) -> float:
    """The best bound found, in seconds, on the step of every plan that holds at most ``allowed`` bytes at ``times``; 0 without any.

    Args:
        weights: the first weights, without paths.
        times: times of the problem at which bytes may have a price.
        budget: work of all solves.
    """
    cuts = Master(model, weights.slowdown, allowed, times)
    best: _PricedSolve | None = None
    prices: Mapping[int, float] = {}
    least_reachable, unpriced = math.inf, 0.0
    idle, stalled, pricing_budget = 0, 0, budget.share(DUAL_PRICE_SHARE)
    while len(cuts.evaluations) < ROUNDS and stalled < IDLE_ROUNDS and not pricing_budget.over:
        problem, unit = model.problem(None, MemoryPriced(weights, prices))
        solution = solve(problem, pricing_budget.at_most(SOLVE_WORK), gap=DUAL_GAIN, patient=False)
        if solution.choices is None or solution.objective is None:
            break
        charged = allowed * sum(prices.values())
        choices = model.expand(solution.choices)
        latest = _PricedSolve(weights, prices, solution.bound * unit / (1 + TIES) - charged, solution.objective * unit, choices)
        idle = 0 if best is None or latest.bound > best.bound * (1 + DUAL_GAIN) else idle + 1
        unpriced = latest.least if best is None else unpriced
        best = latest if best is None or latest.bound > best.bound else best
        cuts.add(Evaluation(model, choices))
        if not prices and cuts.excess_bytes[-1].max() <= 0.0:
            break
        highest = max(FIRST_PRICE_SHARE * best.least / allowed, PRICE_GROWTH * sum(best.prices.values()))
        if highest * max(excess.max() for excess in cuts.excess_bytes) > DUAL_RANGE * unpriced:
            break  # nothing fits: the bound grows without end
        wanted_weights, reachable, wanted_prices = cuts.best_weights(highest)
        if reachable <= best.bound * (1 + DUAL_GAIN):
            break
        stalled = 0 if idle == 0 or reachable < least_reachable * (1 - DUAL_GAIN) else stalled + 1
        least_reachable = min(least_reachable, reachable)
        share = DUAL_STEP * DUAL_STEP_DECAY**idle
        weights = blend(wanted_weights, best.weights, share)
        prices = {time: share * price + (1 - share) * best.prices.get(time, 0.0) for time, price in wanted_prices.items()}
    if best is None:
        return 0.0
    charged = allowed * sum(best.prices.values())
    priced = MemoryPriced(best.weights, best.prices)
    return model.prove_bound(priced, best.bound + charged, best.least, budget.at_most(SOLVE_WORK), best.choices) - charged

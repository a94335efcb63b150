"""A bound where memory is short: what is held is paid for (Lagrange multipliers on the limit, at several times of the problem).

For any weights of the sums that bound a phase (``bounds``) and any prices of a byte at any times, the least of weighted seconds and rents
together, less the rents of all that is allowed, bounds the step of every plan that fits. Weights and prices are found together by cutting
planes, as without a limit: with second runs other sums become long, so that the best weights there are others.
Rents are costs of nodes alone, so that equal layers are cut apart as in ``folded``, where limits could not be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from autopar.effort import Budget
from autopar.search.bounds.surrogate import Answer, Master, Multipliers, blend
from autopar.search.ilp.model import TIES, Model, Node, Priced, Weights
from autopar.search.solving import solve
from solvers import Status

SECONDS, MOST = 3.0, 12.0
"""For one solve, and where that is too short for an answer on the machine."""
ASKING = 0.65
"""Share of the time for the prices; the rest is for the proof that what they give holds for layers left free."""
ASKED, IDLE = 14, 3
"""Prices tried, at most, and so many of which none has raised the bound or lowered what the cuts leave to be reached: prices that are too
high tell that, and what follows them comes to more."""
FIRST, FURTHER = 0.06, 4.0
"""The highest first price, as the share of the seconds that renting all that is allowed costs, and by how much others may be higher than
those of the best bound."""
HIGHEST = 0.99
"""Share of the highest prices from which others may have been left out."""
GAIN = 5e-4
"""The gap at which a solve stops, and the relative gain for which no other price is tried at all."""
SHARE, LESS, LEAST = 0.5, 0.6, 0.1
"""Of what the answers so far want; the rest is what gave the best bound. By how much less after each that gave none, and at least."""


@dataclass(frozen=True)
class MemoryPriced:
    """As ``Weights``: those of others, and what is held at some times of the problem at a price.

    Args:
        prices: seconds of a byte at each time.
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
    """Bytes of each choice at a time."""
    return np.array([float(sum(size for begin, end, size in items if begin <= time < end)) for items in node.items])


@dataclass(frozen=True)
class _Asked:
    """What was asked under some weights and prices, and found: the bound on steps, and seconds and rents of the answer together."""

    weights: Multipliers
    prices: Mapping[int, float]
    bound: float
    least: float
    choices: np.ndarray


def lagrangian_bound(
    model: Model, weights: Multipliers, allowed: float, times: Sequence[int], budget: Budget, enough: float = 0.0
) -> float:
    """The best bound found on the step of every plan that holds at most ``allowed`` bytes at some times; 0 without any.

    Args:
        weights: to begin from; none of paths.
        times: at which bytes may be paid for.
        budget: what it may spend.
        enough: the relative gain for which no other price is tried.
    """
    cuts = Master(model, weights.slowdown, allowed, times)
    best: _Asked | None = None
    prices: Mapping[int, float] = {}
    within = math.inf
    idle, still, seconds, asking = 0, 0, SECONDS, budget.share(ASKING)
    while len(cuts.answers) < ASKED and still < IDLE and (left := asking.left) > 0:
        problem, unit = model.problem(None, MemoryPriced(weights, prices))
        found = solve(problem, asking.at_most(seconds), gap=GAIN, patient=False)
        if found.choices is None or found.objective is None:
            if found.status is Status.INFEASIBLE or seconds >= min(MOST, left):
                break
            seconds = min(2 * seconds, MOST)
            continue
        charged = allowed * sum(prices.values())
        choices = model.expand(found.choices)
        asked = _Asked(weights, prices, found.bound * unit / (1 + TIES) - charged, found.objective * unit, choices)
        idle = 0 if best is None or asked.bound > best.bound * (1 + GAIN) else idle + 1
        best = asked if best is None or asked.bound > best.bound else best
        cuts.add(Answer(model, choices))
        if not prices and cuts.beyond[-1].max() <= 0.0:
            break
        highest = max(FIRST * best.least / allowed, FURTHER * sum(best.prices.values()))
        wanted, most, dear = cuts.best(highest)
        bounded = sum(dear.values()) > HIGHEST * highest  # higher prices may bring more than ``most``
        if most <= best.bound * (1 + (GAIN if bounded else max(enough, GAIN))):
            break
        still = 0 if idle == 0 or most < within * (1 - GAIN) else still + 1
        within = min(within, most)
        share = max(SHARE * LESS**idle, LEAST)
        weights = blend(wanted, best.weights, share)
        prices = {time: share * price + (1 - share) * best.prices.get(time, 0.0) for time, price in dear.items()}
    if best is None:
        return 0.0
    charged = allowed * sum(best.prices.values())
    rented = MemoryPriced(best.weights, best.prices)
    return model.proved(rented, best.bound + charged, best.least, budget.at_most(MOST), best.choices) - charged

"""The bound that counts calls (``calls``).

Every plan is of one of as many kinds as there are ways to say of each group of calls whether some of its values share a call, and costs
at least what its kind does: the least of a problem in which groups count ``alone``, or any mixture of the other ways. Memory may be paid
for in each (``renting``). Mixtures and prices are found by cutting planes: an answer found for one kind is a cut for all. What is asked
next is what may come halfway to what the cuts allow, and of that the nearest to what gave the best bound so far: a level method
(Lemaréchal, Nemirovskii, Nesterov 1995).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from time import perf_counter
from typing import NamedTuple

import numpy as np
import pulp

from autopar.search.bounds import levels
from autopar.search.calls import ALONE, GROUPS, ONCE, READERS, WAYS, Charges, Group, Ways
from autopar.search.model import Weights
from autopar.search.renting import FIRST, FURTHER, Rented

Ask = Callable[[Weights], tuple[float, np.ndarray | None]]
"""The bound of the problem under some weights, infinite where it has no answer and 0 where none is known; and the answer's choice for each
node of the model."""
Kind = frozenset[Group]
"""Of plans: the groups in which no two values share a call."""
GAIN, IDLE = 5e-4, 6
"""Relative gain for which nothing else is asked about a kind, and so many that brought less."""
LEVEL = 0.5
"""How much of what the answers allow beyond the best bound what is asked next may come to."""


class _Known(NamedTuple):
    """Seconds that plans of a kind cost at least, and what of it each group counts whatever is chosen."""

    seconds: float
    constant: Mapping[Group, float]


class _Answer(NamedTuple):
    """What it counts without the groups, what each group counts, and what it holds at each time beyond what is allowed."""

    seconds: float
    groups: np.ndarray
    beyond: np.ndarray


@dataclass
class Counting:
    """The search for that bound.

    Args:
        bound: one on every plan.
        allowed, times: where bytes have a price: how many are free of it, and at which times of the model.
    """

    charges: Charges
    ask: Ask
    bound: float
    allowed: float = 0.0
    times: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.priced = self.charges.mixture.price(self.charges.model)
        self.answers: list[_Answer] = []
        self.known: dict[Kind, _Known] = {}
        self.prices = np.zeros(len(self.times))
        self.ways: Ways = dict.fromkeys(GROUPS, ONCE)
        """With the prices, what gave the last bound that was the best of its kind."""

    def best(self, gain: float, until: float) -> float:
        """The bound on every plan. Asked is always about the kind of which least is known.

        Args:
            gain: seconds for which nothing is asked.
            until: the ``perf_counter`` up to which it may take.
        """
        if not self.charges.model.space.links or self.charges.most <= gain:
            return self.bound
        kinds = [frozenset(some) for count in range(len(GROUPS) + 1) for some in combinations(GROUPS, count)]
        done = set[Kind]()
        while True:
            kind, *others = sorted(kinds, key=lambda kind: (self._reached(kind), -len(kind) if self.known else len(kind)))
            if kind in done or self._reached(kind) == math.inf or perf_counter() >= until:
                return self._reached(kind)
            if self._raised(kind, max(self._reached(others[0]), self.bound + gain), until):
                done.add(kind)

    def _reached(self, kind: Kind) -> float:
        """What plans of a kind cost at least: ``alone`` counts more than any other way, but for what these count whatever is chosen."""
        fewer = ((groups, known) for groups, known in self.known.items() if groups <= kind)
        return max([self.bound, *(known.seconds - sum(known.constant[group] for group in kind - groups) for groups, known in fewer)])

    def _raised(self, kind: Kind, enough: float, until: float) -> bool:
        """Raises what is known of a kind above what is enough; whether asking again would raise it no more."""
        best, idle = self.known[kind].seconds if kind in self.known else 0.0, 0
        while best <= enough and perf_counter() < until:
            known = max(best, self._reached(kind))
            ways, prices, most = self._next(kind, known)
            if self.answers and (most <= known * (1 + GAIN) or idle >= IDLE):
                return True
            paid = {time: float(price) for time, price in zip(self.times, prices, strict=True) if price > 0.0}
            counted = self.charges.counted(ways)
            found, choices = self.ask(Rented(counted, paid) if paid else counted)
            constant = {group: float((ways[group] * seconds).sum()) for group, seconds in self.charges.constant.items()}
            found += sum(constant.values()) - self.allowed * float(prices.sum())
            idle = 0 if found > known * (1 + GAIN) else idle + 1
            if found > best:
                best, self.prices, self.ways = found, prices, ways
                self.known[kind] = _Known(best, constant)
            if choices is None:
                return True
            seconds, groups = self.charges.of(self.priced, choices)
            beyond = levels(self.charges.model, choices)[list(self.times)] - self.allowed if self.times else np.zeros(0)
            self.answers.append(_Answer(seconds, groups, beyond))
        return False

    def _center(self, kind: Kind, group: Group) -> np.ndarray:
        """The ways that gave the last best bound, as far as a group may count by them in plans of a kind."""
        alone = WAYS.index("alone")
        fits = (self.ways[group][:, alone].sum() > 0.0) == (group in kind)
        return self.ways[group] if fits else ALONE if group in kind else ONCE

    def _next(self, kind: Kind, known: float) -> tuple[Ways, np.ndarray, float]:
        """The ways to count and the prices that are asked next; and the highest bound that the answers allow."""
        center = {group: self._center(kind, group) for group in GROUPS}
        if not self.answers:
            return center, self.prices, math.inf
        problem = pulp.LpProblem("calls", pulp.LpMaximize)
        top = problem.add_variable("bound")
        places = [
            (number, reader, way)
            for number, group in enumerate(GROUPS) for reader in range(len(READERS)) for way in range(len(WAYS))
            if (WAYS[way] == "alone") == (group in kind)
        ]  # fmt: skip
        shares = [problem.add_variable(f"share{number}", 0, 1) for number in range(len(places))]
        rents = [problem.add_variable(f"rent{time}", 0, 1) for time in self.times]
        for number in range(len(GROUPS)):
            problem += pulp.lpSum(share for share, place in zip(shares, places, strict=True) if place[0] == number) == 1
        problem += pulp.lpSum(rents) <= 1
        scale = max(answer.seconds for answer in self.answers)
        highest = max(FIRST * scale / self.allowed, FURTHER * float(self.prices.sum())) if self.times else 1.0
        for answer in self.answers:
            mixed = pulp.lpSum(share * (answer.groups[place] / scale) for share, place in zip(shares, places, strict=True))
            rented = pulp.lpSum(rent * (highest / scale * over) for rent, over in zip(rents, answer.beyond, strict=True))
            problem += top <= mixed + rented + answer.seconds / scale
        problem.setObjective(top)
        problem.solve(pulp.HiGHS(msg=False))
        most = top.value() * scale
        if most <= known * (1 + GAIN):
            return center, self.prices, most
        begin = [*(center[GROUPS[number]][reader, way] for number, reader, way in places), *(self.prices / highest)]
        far = [problem.add_variable(f"far{number}", 0) for number in range(len(begin))]
        for one, distance, here in zip((*shares, *rents), far, begin, strict=True):
            problem += distance >= one - float(here)
            problem += distance >= float(here) - one
        problem += top >= (known + LEVEL * (most - known)) / scale
        problem.sense = pulp.LpMinimize
        problem.setObjective(pulp.lpSum(far))
        if problem.solve(pulp.HiGHS(msg=False)) != pulp.LpStatusOptimal:
            return center, self.prices, known  # by rounding there is none
        ways = {group: np.zeros((len(READERS), len(WAYS))) for group in GROUPS}
        for share, (number, reader, way) in zip(shares, places, strict=True):
            ways[GROUPS[number]][reader, way] = max(share.value(), 0.0)
        prices = np.array([max(rent.value(), 0.0) for rent in rents]) * highest
        return {group: some / some.sum() for group, some in ways.items()}, prices, most

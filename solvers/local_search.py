"""Neighbourhood search for choices, in episodes: each begins from the dual's newest prices or from the best known choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .arrays import Floats, Ints
from .dual_ascent import MemoryDual, priced
from .elimination_workspace import Workspace, workspace
from .kernels import pass_both
from .kernels.constants import FAR
from .lns_moves import improve
from .memory import Items
from .pairwise import Pairs, total_cost
from .settings import SETTINGS


@dataclass
class LocalSearch:
    """Episodes of sweeps with their own choices, prices and random numbers.

    ``spend`` is told the work of each sweep and says whether to stop. ``best`` are its best feasible choices and ``cost`` theirs;
    ``line`` and ``line_cost`` those since it last began anew. ``left`` sweeps remain of the episode, and ``idle`` episodes have not
    improved the line.
    """

    graph: Pairs
    items: Items
    costs: Floats
    seed: int
    spend: Callable[[float], bool]
    best: Ints | None = None
    cost: float = np.inf
    line: Ints | None = None
    line_cost: float = np.inf
    left: int = 0
    idle: int = 0
    spread: float = 0.0
    fresh_bound: float = -np.inf
    choices: Ints = field(init=False)
    space: Workspace = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng([self.seed, 77])
        self.space = workspace(self.graph, SETTINGS.table_entries)
        self.used = np.zeros(len(self.items.capacity), dtype=np.int64)
        self.prices = np.zeros(len(self.items.capacity))

    def search(self, sweeps: int, dual: MemoryDual) -> None:
        """Do ``sweeps`` sweeps, or fewer when the work is spent."""
        stopped = False
        while sweeps > 0 and not stopped:
            if self.left == 0:
                sweeps -= self._begin(dual)
            largest = 10 ** self.random.uniform(SETTINGS.smallest_power, SETTINGS.largest_power)
            shake = float(self.random.choice(SETTINGS.shakes)) if self.best is not None else 0.0
            stopped = self._sweep(self.items, largest, shake)
            if self.spread > 0.0 and (self.used <= self.items.capacity).all():
                self.prices = dual.best_prices * self.random.lognormal(0.0, self.spread, len(self.prices))
            if self._keep():
                self.left = SETTINGS.episode
            self.left -= 1
            sweeps -= 1

    def _sweep(self, items: Items, largest: float, shake: float) -> bool:
        sizes = largest, shake
        work = improve(self.graph, items, self.costs, self.prices, self.choices, self.used, sizes, self.random, self.space)
        return self.spend(work)

    def adopt(self, choices: Ints, cost: float) -> None:
        """Take over better choices found elsewhere."""
        if cost < self.cost:
            self.best, self.cost = choices.copy(), cost

    def _begin(self, dual: MemoryDual) -> int:
        """Start an episode; returns the sweeps it took."""
        self.spread = float(self.random.choice(SETTINGS.spreads))
        self.idle += 1
        if self.idle > SETTINGS.tired and self.cost < self.line_cost:
            self.line, self.line_cost, self.idle = self.best, self.cost, 0
        news = dual.bound > self.fresh_bound + SETTINGS.renewal * (self.cost - self.fresh_bound)
        if self.line is None or news or self.idle > SETTINGS.tired:
            self.fresh_bound = dual.bound
            self.line, self.line_cost, self.left, self.idle = None, np.inf, SETTINGS.first_episode, 0
            self._decode(dual)
            return SETTINGS.polishing_sweeps
        self.left = SETTINGS.episode
        self.choices = self.line.copy()
        self.prices = dual.best_prices * self.random.lognormal(0.0, float(self.random.choice(SETTINGS.noises)), len(dual.best_prices))
        self.used = self.items.used(self.graph.ptr[:-1] + self.choices)
        return 0

    def _decode(self, dual: MemoryDual) -> None:
        """Begin from choices near the least priced cost, found without regard to the limits."""
        theta, messages, guess = priced(self.costs, self.items, dual.best_prices), dual.best_messages.copy(), dual.decoded.copy()
        least = np.inf
        for _ in range(SETTINGS.polishing_passes):
            pass_both(self.graph, theta, messages, guess)
            self.spend(2 * SETTINGS.entry_work * len(self.graph.table))
            value = total_cost(self.graph, theta, guess)
            if value < least:
                least, self.choices = value, guess.copy()
        self.prices = dual.best_prices.copy()
        self.used = self.items.used(self.graph.ptr[:-1] + self.choices)
        boundless = self.items._replace(capacity=np.full(len(self.used), 2**61, dtype=np.int64))
        for _ in range(SETTINGS.polishing_sweeps):
            self._sweep(boundless, SETTINGS.polishing_largest, 0.0)

    def _keep(self) -> bool:
        """Note the present choices; True when they are the best of their line."""
        cost = total_cost(self.graph, self.costs, self.choices)
        if cost >= min(self.line_cost, FAR / 2) or (self.used > self.items.capacity).any():
            return False
        self.line, self.line_cost, self.idle = self.choices.copy(), cost, 0
        self.adopt(self.line, cost)
        return True

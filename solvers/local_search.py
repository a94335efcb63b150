"""One worker of the primal side: episodes of neighbourhood search, each from the dual's newest prices or from the best known choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from solvers.arrays import Floats, Ints
from solvers.desk import Desk, desk
from solvers.items import Items
from solvers.messages import pass_both, priced
from solvers.neighbourhood import count_use, improve, seed_thread, total_cost
from solvers.pairs import FAR, Pairs

DECODING_PASSES = 10
POLISHING_SWEEPS = 5
"""Sweeps at fixed prices without limits that begin an episode from the dual."""
EPISODE = 60
"""Sweeps of an episode after its last improvement."""
RENEWAL = 0.25
"""Episodes begin from the best choices of their line; a new line begins when the dual has closed this share of the gap."""
TIRED = 4
"""Episodes without progress after which a line goes over to the best choices known, or ends if it has those."""
FIRST_EPISODE = 15
"""Sweeps of an episode while nothing feasible is known: newer prices help more."""
LARGEST = 1e4
"""Entries of the largest table of a polishing sweep."""
SMALLEST_POWER, LARGEST_POWER = 3.0, 4.5
"""Powers of ten between which other sweeps draw theirs."""
SHAKES = (0.0, 0.001, 0.003, 0.01)
"""Shares of nodes set at random before a sweep."""
SPREADS = (0.0, 0.0, 0.03, 0.1, 0.3)
"""An episode draws one: sweeps see the dual's prices with this spread, anew each time; with 0 prices drift with what stops changes."""
NOISES = (0.1, 0.25)
"""Spreads of the prices with which a drifting episode from the line's best choices begins."""
ROOM = 20_000_000
"""Entries of the tables of one sweep in all."""


@dataclass
class Hints:
    """What the dual side hands over at the start of a round."""

    prices: Floats
    messages: Floats
    decoded: Ints
    bound: float


@dataclass
class LocalSearch:
    """A worker with its own choices, prices and random numbers.

    ``best`` are its best feasible choices and ``cost`` theirs; ``line`` and ``line_cost`` those since it last began anew.
    """

    graph: Pairs
    items: Items
    costs: Floats
    seed: int
    best: Ints | None = None
    cost: float = np.inf
    line: Ints | None = None
    line_cost: float = np.inf
    closest: Ints | None = None
    excess: float = np.inf
    left: int = 0
    idle: int = 0
    spread: float = 0.0
    sweeps: int = 0
    fresh_bound: float = -np.inf
    choices: Ints = field(init=False)
    work: Desk = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng([self.seed, 77])
        self.work = desk(self.graph, ROOM)
        self.used = np.zeros(len(self.items.capacity), dtype=np.int64)
        self.prices = np.zeros(len(self.items.capacity))

    def search(self, sweeps: int, hints: Hints, stop: Callable[[], bool]) -> None:
        """Do ``sweeps`` sweeps, or fewer when ``stop`` says so."""
        seed_thread(int(self.random.integers(2**31)))
        while sweeps > 0 and not stop():
            if self.left == 0:
                sweeps -= self._begin(hints)
            largest = 10 ** self.random.uniform(SMALLEST_POWER, LARGEST_POWER)
            shake = float(self.random.choice(SHAKES)) if self.best is not None else 0.0
            improve(self.graph, self.items, self.costs, self.prices, self.choices, self.used, largest, shake, self.work)
            if self.spread > 0.0 and (self.used <= self.items.capacity).all():
                self.prices = hints.prices * self.random.lognormal(0.0, self.spread, len(self.prices))
            if self._keep():
                self.left = EPISODE
            self.sweeps += 1
            self.left -= 1
            sweeps -= 1

    def adopt(self, choices: Ints, cost: float) -> None:
        """Take over better choices found elsewhere."""
        if cost < self.cost:
            self.best, self.cost = choices.copy(), cost

    def _begin(self, hints: Hints) -> int:
        """Start an episode; returns the sweeps it took."""
        self.spread = float(self.random.choice(SPREADS))
        self.idle += 1
        if self.idle > TIRED and self.cost < self.line_cost:
            self.line, self.line_cost, self.idle = self.best, self.cost, 0
        news = self.line is not None and hints.bound > self.fresh_bound + RENEWAL * (self.cost - self.fresh_bound)
        if self.line is None or news or self.idle > TIRED:
            self.fresh_bound = hints.bound
            self.line, self.line_cost, self.left, self.idle = None, np.inf, FIRST_EPISODE, 0
            self._decode(hints)
            return POLISHING_SWEEPS
        self.left = EPISODE
        self.choices = self.line.copy()
        self.prices = hints.prices * self.random.lognormal(0.0, float(self.random.choice(NOISES)), len(hints.prices))
        count_use(self.graph, self.items, self.choices, self.used)
        return 0

    def _decode(self, hints: Hints) -> None:
        """Choices near the least priced cost, without regard to the limits."""
        theta, messages, guess = np.empty(len(self.costs)), hints.messages.copy(), hints.decoded.copy()
        usage = self.items.usage.astype(np.float64)
        priced(self.costs, self.items.ptr, self.items.begin, self.items.end, usage, hints.prices, theta)
        least = np.inf
        for _ in range(DECODING_PASSES):
            pass_both(self.graph, theta, messages, guess)
            value = total_cost(self.graph, theta, guess)
            if value < least:
                least, self.choices = value, guess.copy()
        boundless = self.items._replace(capacity=np.full(len(self.used), 2**61, dtype=np.int64))
        for _ in range(POLISHING_SWEEPS):
            self.prices = hints.prices.copy()
            count_use(self.graph, self.items, self.choices, self.used)
            improve(self.graph, boundless, self.costs, self.prices, self.choices, self.used, LARGEST, 0.0, self.work)
        self.prices = hints.prices.copy()

    def _keep(self) -> bool:
        """Note the present choices; True when they are the best of their line."""
        cost = total_cost(self.graph, self.costs, self.choices)
        if cost >= FAR / 2:
            return False
        excess = float(np.max(self.used - self.items.capacity, initial=0))
        if excess <= 0 and cost < self.line_cost:
            self.line, self.line_cost, self.idle = self.choices.copy(), cost, 0
            if cost < self.cost:
                self.best, self.cost = self.line, cost
            return True
        if excess < self.excess:
            self.closest, self.excess = self.choices.copy(), excess
        return False

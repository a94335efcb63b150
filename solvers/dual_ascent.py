"""The dual: prices of memory by projected ascent on top of message passing.

Message passing alone closes the last part of its bound slowly, in steps that hardly differ; carrying on in the direction of the last
step (Nesterov's momentum) reaches the same bound in a tenth of the passes, and any messages prove a bound. After every few passes the
messages' beliefs, read as probabilities at a low temperature, tell how much memory would be used; prices rise where that exceeds the
room and fall elsewhere, each in proportion to how steadily it has been pushed one way (as Adam does), by a step that aims at a target
bound (Polyak's). A run without progress goes back to the best prices with a shorter step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .arrays import Floats, Ints
from .kernels import extrapolate, gather_beliefs, pass_both
from .kernels.constants import FAR
from .memory import Items
from .pairwise import Pairs, total_cost
from .settings import SETTINGS


@dataclass
class MemoryDual:
    """Prices and messages on their way up. ``bound`` is the best certified bound so far, at ``best_prices``; costs in the core's unit.

    ``spend`` is told the work of each pass and says whether to stop. ``decoded`` are the choices of the last pass; where there is no
    memory to price, ``answer`` are the cheapest of all passes.
    """

    graph: Pairs
    items: Items
    costs: Floats
    spend: Callable[[float], bool]
    upper: float = np.inf
    start: Floats | None = None
    bound: float = -np.inf
    step: float = SETTINGS.first_step
    cold: float = SETTINGS.temperature
    stopped: bool = False
    bad: int = 0
    target: float = 0.0
    theta: Floats = field(init=False)
    prices: Floats = field(init=False)
    best_prices: Floats = field(init=False)
    messages: Floats = field(init=False)
    best_messages: Floats = field(init=False)
    decoded: Ints = field(init=False)
    answer: Ints = field(init=False)
    answer_cost: float = np.inf
    trend: Floats | None = None
    squares: Floats | None = None
    pace: int = 0
    last: float = -np.inf

    def __post_init__(self) -> None:
        self.theta = self.costs.copy()
        self.prices = np.zeros(len(self.items.capacity)) if self.start is None else self.start.copy()
        self.best_prices = self.prices.copy()
        self.messages = no_messages(self.graph)
        self.best_messages = self.messages.copy()
        self.previous = self.messages.copy()
        self.decoded = np.zeros(len(self.graph.split), dtype=np.int64)
        self.answer = self.decoded.copy()
        self.room = self.items.capacity.astype(np.float64)
        self.price()

    def warm_up(self, gap: float = 0.0, constant: float = 0.0) -> None:
        """Messages at the first prices, and the first bound; fewer where there is no memory to price and an answer is so near it,
        ``constant`` being what every answer costs beside."""
        for _ in range(SETTINGS.warm_passes):
            self._pass()
            near = self.answer_cost < FAR / 2 and self.answer_cost - self.bound <= gap * (self.answer_cost + constant)
            if near or self.stopped:
                break
        self.target = max(self.bound * 1.2, 1.0)

    def ascend(self, updates: int) -> None:
        """Change the prices ``updates`` times, or until the work is spent."""
        for _ in range(updates):
            if self.stopped:
                return
            before = self.bound
            value = self._pass(SETTINGS.dual_passes)
            if value > before + SETTINGS.progress * abs(before):
                self.bad, self.step = 0, min(1.0, self.step * SETTINGS.step_growth)
            else:
                self.bad += 1
            if not len(self.prices) and value <= before + SETTINGS.tight * abs(before):
                return
            if self.bad >= SETTINGS.dual_patience:
                self.step *= SETTINGS.step_cut
                self.bad = 0
                self.trend = None
                self.prices = self.best_prices.copy()
                if self.step < SETTINGS.least_step:
                    self.step = SETTINGS.next_step
                    self.cold *= SETTINGS.cooling
            if len(self.prices):
                self._move(value)

    def _pass(self, times: int = 1) -> float:
        value = -np.inf
        for _ in range(times):
            extrapolate(self.messages, self.previous, min(SETTINGS.momentum, self.pace / (self.pace + 3)))
            self.pace += 1
            value = pass_both(self.graph, self.theta, self.messages, self.decoded)
            self.stopped = self.spend(2 * SETTINGS.entry_work * len(self.graph.table))
            self._keep()
        value -= dot(self.prices, self.room)
        if value < self.last:
            self.pace = 0
        self.last = value
        if value > self.bound:
            self.bound, self.best_prices, self.best_messages = value, self.prices.copy(), self.messages.copy()
        return value

    def _keep(self) -> None:
        cost = np.inf if len(self.prices) else total_cost(self.graph, self.costs, self.decoded)
        if cost < min(self.answer_cost, FAR / 2):
            self.answer, self.answer_cost = self.decoded.copy(), cost

    def _move(self, value: float) -> None:
        if self.bound > 0.95 * self.target:
            self.target = self.target * 1.3
        target = min(self.target, self.upper)
        ceiling = self.upper if np.isfinite(self.upper) else self.target
        temperature = self.cold * max(ceiling - self.bound, 1e-3 * abs(ceiling), 1e-9) / len(self.decoded)
        used = expected_usage(self.graph, self.items, self.theta, self.messages, temperature)
        room = np.maximum(self.room, 1.0)
        excess = (used - self.room) / room
        slope = np.clip(excess, -1.0, 1.0)
        if self.trend is None or self.squares is None:
            self.trend, self.squares = slope, slope * slope
        else:
            self.trend = SETTINGS.gradient_memory * self.trend + (1 - SETTINGS.gradient_memory) * slope
            self.squares = SETTINGS.square_memory * self.squares + (1 - SETTINGS.square_memory) * slope * slope
        size = np.sqrt(self.squares)
        moving = self.trend / np.maximum(size + SETTINGS.evening * size.max(), 1e-12)
        moving[(self.prices <= 0) & (moving < 0)] = 0.0
        ahead = max(dot(moving, slope), SETTINGS.steepest * np.sqrt(dot(moving, moving) * dot(slope, slope)), 1e-9)
        length = self.step * max(target - value, 0.01 * abs(target)) / ahead
        self.prices = np.maximum(0.0, self.prices + length * moving / room)
        self.price()

    def price(self) -> None:
        """Node costs at the present prices."""
        self.theta = priced(self.costs, self.items, self.prices)


def no_messages(graph: Pairs) -> Floats:
    """Make messages that move nothing."""
    sizes = np.diff(graph.ptr)
    return np.zeros(int(sizes[graph.low].sum() + sizes[graph.high].sum()))


def priced(costs: Floats, items: Items, prices: Floats) -> Floats:
    """Add what their items pay to the costs of the choices."""
    if len(items.usage) == 0:
        return costs.copy()
    paid = np.concatenate([[0.0], np.cumsum(prices)])
    return costs + np.bincount(items.owner, items.usage * (paid[items.end] - paid[items.begin]), len(costs))


def expected_usage(graph: Pairs, items: Items, theta: Floats, messages: Floats, temperature: float) -> Floats:
    """Estimate the usage at each time when choices are drawn with probabilities exp(-belief / temperature)."""
    over = np.empty(len(theta))
    gather_beliefs(graph, theta, messages, over)
    weight = np.exp(-np.minimum(700.0, over / temperature))
    share = weight / np.repeat(np.add.reduceat(weight, graph.ptr[:-1]), np.diff(graph.ptr))
    share[share <= 1e-6] = 0.0
    return items.over_time(items.usage * np.repeat(share, np.diff(items.ptr)))


def dot(one: Floats, other: Floats) -> float:
    """Sum products, in an order that does not depend on the threads of a BLAS."""
    return float((one * other).sum())

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

from solvers.arrays import Floats, Ints
from solvers.compiled import kernel_or
from solvers.items import Items
from solvers.messages import collect, no_messages, pass_both, priced
from solvers.messages_numpy import beliefs
from solvers.neighbourhood import total_cost
from solvers.pairs import FAR, Pairs

WARM_PASSES = 40
"""Passes at the first prices, mostly none, before they change."""
PASSES = 2
"""Passes forth and back for each change of prices."""
MOMENTUM = 0.9
"""Share of the last step of the messages that the next one repeats, at most; k / (k + 3) in the k-th pass since the bound last fell."""
COLD = 0.1
"""Temperature, as a share of the gap per node."""
COOLING = 0.5
"""Factor of the temperature whenever the step begins anew."""
MEMORY, SQUARES = 0.9, 0.95
"""Weights of earlier gradients and of their squares."""
EVENING = 0.1
"""Share of the largest gradient to which smaller ones are evened out."""
STEEPEST = 0.2
"""The step counts on the price of at least this cosine between its direction and the gradient."""
FIRST_STEP = 0.1
"""Share of the step that would close the gap if the dual were flat; longer ones throw the first prices far off."""
PATIENCE = 12
"""Changes of prices without a better bound before the step is cut."""
CUT, GROW = 0.7, 1.1
"""Factors of the step after a run without progress and after progress."""
LEAST_STEP, NEXT_STEP = 0.003, 0.05
"""A step cut below the first begins anew with the second."""
CONVERGED = 1e-9
"""Without prices, passes end once a few gain less than this share of the bound."""
PROGRESS = 1e-5
"""A bound counts as better when it grows by this share."""


@dataclass
class Dual:
    """Prices and messages on their way up. ``bound`` is the best certified bound so far, at ``best_prices``; costs in the core's unit.

    ``decoded`` are the choices of the last pass; where there is no memory to price, ``answer`` are the cheapest of all passes.
    """

    graph: Pairs
    items: Items
    costs: Floats
    upper: float = np.inf
    start: Floats | None = None
    bound: float = -np.inf
    step: float = FIRST_STEP
    cold: float = COLD
    bad: int = 0
    updates: int = 0
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
        self.usage = self.items.usage.astype(np.float64)
        self.room = self.items.capacity.astype(np.float64)
        self.price()

    def warm_up(self, gap: float = 0.0, constant: float = 0.0) -> None:
        """Messages at the first prices, and the first bound; fewer where there is no memory to price and an answer is so near it,
        ``constant`` being what every answer costs beside."""
        for _ in range(WARM_PASSES):
            self._pass()
            if self.answer_cost < FAR / 2 and self.answer_cost - self.bound <= gap * (self.answer_cost + constant):
                break
        self.target = max(self.bound * 1.2, 1.0)

    def ascend(self, updates: int, stop: Callable[[], bool]) -> None:
        """Change the prices ``updates`` times, or until ``stop`` says so."""
        for _ in range(updates):
            if stop():
                return
            before = self.bound
            value = self._pass(PASSES)
            if value > before + PROGRESS * abs(before):
                self.bad, self.step = 0, min(1.0, self.step * GROW)
            else:
                self.bad += 1
            if not len(self.prices) and value <= before + CONVERGED * abs(before):
                return
            if self.bad >= PATIENCE:
                self.step *= CUT
                self.bad = 0
                self.trend = None
                self.prices = self.best_prices.copy()
                if self.step < LEAST_STEP:
                    self.step = NEXT_STEP
                    self.cold *= COOLING
            if len(self.prices):
                self._move(value)
            self.updates += 1

    def _pass(self, times: int = 1) -> float:
        value = -np.inf
        for _ in range(times):
            carry_on(self.messages, self.previous, min(MOMENTUM, self.pace / (self.pace + 3)))
            self.pace += 1
            value = pass_both(self.graph, self.theta, self.messages, self.decoded)
            self._keep()
        value -= float(self.prices @ self.room)
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
        used = np.empty(len(self.prices))
        soft_use(self.graph, self.theta, self.messages, temperature, self.items, self.usage, used)
        room = np.maximum(self.room, 1.0)
        excess = (used - self.room) / room
        slope = np.clip(excess, -1.0, 1.0)
        if self.trend is None or self.squares is None:
            self.trend, self.squares = slope, slope * slope
        else:
            self.trend = MEMORY * self.trend + (1 - MEMORY) * slope
            self.squares = SQUARES * self.squares + (1 - SQUARES) * slope * slope
        size = np.sqrt(self.squares)
        moving = self.trend / np.maximum(size + EVENING * size.max(), 1e-12)
        moving[(self.prices <= 0) & (moving < 0)] = 0.0
        ahead = max(float(moving @ slope), STEEPEST * float(np.sqrt((moving @ moving) * (slope @ slope))), 1e-9)
        length = self.step * max(target - value, 0.01 * abs(target)) / ahead
        self.prices = np.maximum(0.0, self.prices + length * moving / room)
        self.price()

    def price(self) -> None:
        """Node costs at the present prices."""
        priced(self.costs, self.items.ptr, self.items.begin, self.items.end, self.usage, self.prices, self.theta)


def _carry_on(messages: Floats, previous: Floats, share: float) -> None:
    now = messages.copy()
    allowed = (now < FAR / 2) & (previous < FAR / 2)
    messages[allowed] += share * (now[allowed] - previous[allowed])
    previous[:] = now


@kernel_or(_carry_on)
def carry_on(messages: Floats, previous: Floats, share: float) -> None:
    """Move the messages on by a share of their last step; ``previous`` becomes what they were."""
    for k in range(len(messages)):
        now = messages[k]
        if now < FAR / 2 and previous[k] < FAR / 2:
            messages[k] = now + share * (now - previous[k])
        previous[k] = now


def _soft_use(graph: Pairs, theta: Floats, messages: Floats, temperature: float, items: Items, usage: Floats, used: Floats) -> None:
    belief, sizes = beliefs(graph, theta, messages), np.diff(graph.ptr)
    over = belief - np.repeat(np.minimum.reduceat(belief, graph.ptr[:-1]), sizes)
    weight = np.exp(-np.minimum(700.0, over / temperature))
    share = weight / np.repeat(np.add.reduceat(weight, graph.ptr[:-1]), sizes)
    share[share <= 1e-6] = 0.0
    expected = usage * np.repeat(share, np.diff(items.ptr))
    change = np.bincount(items.begin, expected, len(used) + 1) - np.bincount(items.end, expected, len(used) + 1)
    used[:] = np.cumsum(change)[:-1]


@kernel_or(_soft_use)
def soft_use(graph: Pairs, theta: Floats, messages: Floats, temperature: float, items: Items, usage: Floats, used: Floats) -> None:
    """Usage at each time when choices are drawn with probabilities exp(-belief / temperature)."""
    used[:] = 0.0
    widest = 0
    for i in range(len(graph.split)):
        widest = max(widest, graph.ptr[i + 1] - graph.ptr[i])
    room = np.empty(widest)
    for i in range(len(graph.split)):
        begin = graph.ptr[i]
        belief = room[: graph.ptr[i + 1] - begin]
        collect(graph, theta, messages, i, belief)
        least = belief.min()
        total = 0.0
        for k in range(len(belief)):
            belief[k] = np.exp(-min(700.0, (belief[k] - least) / temperature))
            total += belief[k]
        for k in range(len(belief)):
            share = belief[k] / total
            if share > 1e-6:
                for item in range(items.ptr[begin + k], items.ptr[begin + k + 1]):
                    used[items.begin[item]] += share * usage[item]
                    if items.end[item] < len(used):
                        used[items.end[item]] -= share * usage[item]
    for t in range(1, len(used)):
        used[t] += used[t - 1]

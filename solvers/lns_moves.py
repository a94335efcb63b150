"""Local search under the hard limits: an elimination sweep proposes, the changes that hang together are taken or left as one.

A group of changes is taken when it lowers the cost, with or without the price of memory, and exceeds no limit that is not exceeded
already less. Times that stop groups become dearer, times with room to spare cheaper.
"""

from __future__ import annotations

import numpy as np

from .arrays import Floats, Ints
from .dual_ascent import priced
from .elimination_workspace import Workspace, entries_visited
from .kernels import accept_groups, group_changes, plan_order, sweep
from .kernels.constants import FAR
from .memory import Items
from .pairwise import Pairs
from .settings import SETTINGS


def improve(
    graph: Pairs, items: Items, costs: Floats, prices: Floats, choices: Ints, used: Ints, sizes: tuple[float, float],
    random: np.random.Generator, space: Workspace,
) -> float:  # fmt: skip
    """One sweep from ``choices``, which change in place with ``used`` and ``prices``; returns the work it took.

    Args:
        sizes: table entries looked at for one node, at most, and the share of nodes that are set at random.
    """
    largest, shake = sizes
    nodes, theta = len(choices), priced(costs, items, prices)
    jitter, held = 1.0 + SETTINGS.jitter * random.random(nodes), random.random(nodes) < shake
    proposal = np.where(held, (random.random(nodes) * np.diff(graph.ptr)).astype(np.int64), choices)
    count = plan_order(graph, held.astype(np.uint8), jitter, random.random(nodes), largest, len(space.pool), space)
    visited = entries_visited(graph, count, space)
    sweep(graph, theta, proposal, count, space)
    stops = accept(graph, items, theta, costs, choices, proposal, used, space)
    update_prices(items, prices, used, stops)
    return SETTINGS.entry_work * visited + SETTINGS.node_work * nodes


def accept(
    graph: Pairs, items: Items, theta: Floats, costs: Floats, choices: Ints, proposal: Ints, used: Ints, space: Workspace
) -> Ints:  # fmt: skip
    """Take the groups of changes that help, cheapest first; returns how many groups each time stopped."""
    stops = np.zeros(len(used), dtype=np.int64)
    gain_priced, gain_true = np.empty(len(choices)), np.empty(len(choices))
    groups = group_changes(graph, theta, costs, choices, proposal, gain_priced, gain_true, space)
    order = np.argsort(gain_priced[:groups], kind="stable")
    helps = ((gain_true[order] < 0.0) | (gain_priced[order] < 0.0)) & (gain_true[order] < FAR / 2)
    change = np.zeros(len(used) + 1, dtype=np.int64)
    accept_groups(graph, items, order[helps], choices, proposal, used, change, stops, space)
    return stops


def update_prices(items: Items, prices: Floats, used: Ints, stops: Ints) -> None:
    """Move the prices: up where the limit is exceeded or stopped a change, down where there is room."""
    mean = float(prices.sum()) / max(1, int(np.count_nonzero(prices > 0.0)))
    room = items.capacity - used
    over, stopped = room < 0, (room >= 0) & (stops > 0)
    free = (room >= 0) & (stops == 0) & (items.capacity > 0)
    prices[over] = prices[over] * SETTINGS.price_over + SETTINGS.price_over_mean * mean
    rise = np.exp(SETTINGS.price_stopped * np.minimum(stops[stopped], 3))
    prices[stopped] = prices[stopped] * rise + SETTINGS.price_stopped_mean * mean
    prices[free] *= np.exp(-SETTINGS.price_free * room[free] / items.capacity[free])

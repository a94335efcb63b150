"""What a bound and an answer together rule out: choices and pairs that would cost as much as the answer or more.

The messages' certificate is a sum of least entries, so forcing one choice adds what its own entries lie above the least. The smaller
problem keeps every better answer; its exact solution closes the gap that prices leave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .arrays import Floats, Ints, offsets
from .dual_ascent import priced
from .kernels import copy_open_entries, fill_reduced_costs
from .kernels.constants import NEVER
from .message_search import MessageSearch
from .pairwise import Pairs
from .problem import INFINITE, Problem
from .reduction import Core, reduce
from .settings import SETTINGS


@dataclass(frozen=True, eq=False)
class FixedCore:
    """A core's remaining choices as a problem of its own; its last node is a ballast that stands for memory already spoken for."""

    problem: Problem
    kept: Ints
    node_ptr: Ints
    core: Core

    def expand(self, choices: Ints) -> Ints:
        """Choices of the core's problem from those of this one."""
        picked = self.kept[self.node_ptr[:-1] + choices[:-1]]
        return self.core.expand(picked - self.core.node_ptr[:-1])

    def restrict(self, choices: Ints) -> Ints:
        """The way back, with -1 where a choice is gone."""
        inside = self.core.restrict(choices)
        flat = self.core.node_ptr[:-1] + inside
        place = np.searchsorted(self.kept, flat)
        here = (inside >= 0) & (place < len(self.kept)) & (self.kept[np.minimum(place, len(self.kept) - 1)] == flat)
        return np.append(np.where(here, place - self.node_ptr[:-1], -1), 0)


def reduced_costs(graph: Pairs, theta: Floats, messages: Floats) -> tuple[Floats, Floats]:
    """By how much the certified bound rises when a choice is forced, shape [C], and when a pair is, laid out as ``graph.table``."""
    choice, pair = np.zeros(len(theta)), np.empty(len(graph.table))
    fill_reduced_costs(graph, theta, messages, choice, pair)
    return choice, pair


def fix_by_reduced_cost(core: Core, graph: Pairs, choice: Floats, pair: Floats, room: float) -> FixedCore | None:
    """The problem of choices and pairs whose forcing raises the bound by less than ``room``; None when nothing can be said."""
    finite = core.edge_costs[core.edge_costs < NEVER]
    if max(int(finite.max(initial=0)), int(core.costs.max(initial=0))) >= INFINITE:
        return None
    open_ = choice < room
    kept = np.flatnonzero(open_)
    owner = np.repeat(np.arange(core.num_nodes), np.diff(core.node_ptr))
    counts = np.bincount(owner[kept], minlength=core.num_nodes).astype(np.int64)
    if (counts == 0).any():
        return None
    node_ptr, items = offsets(counts), core.items
    edge_ptr = offsets(counts[graph.low] * counts[graph.high])
    tables = np.empty(edge_ptr[-1], dtype=np.int64)
    copy_open_entries(graph, open_.astype(np.uint8), pair, room, INFINITE, tables)
    _, item = items.of(kept)
    item_ptr = offsets(np.diff(items.ptr)[kept])
    limit = int(items.capacity.max(initial=0)) if len(items.capacity) else None
    problem = Problem(
        name="",
        node_ptr=node_ptr,
        costs=core.costs[kept],
        edges=np.stack([graph.low, graph.high], axis=1),
        edge_ptr=edge_ptr,
        edge_costs=tables,
        item_ptr=item_ptr,
        item_begin=items.begin[item],
        item_end=items.end[item],
        item_usage=items.usage[item],
        limit=limit,
    )
    taken = (limit or 0) - items.capacity
    ballast = [(int(time), int(time) + 1, int(taken[time])) for time in np.flatnonzero(taken > 0)]
    return FixedCore(problem.extended([[0]], items=[[ballast]]), kept, node_ptr, core)


def shrink(search: MessageSearch, target: float, most: float = 1.0) -> Core | None:
    """The core of what answers that cost less than ``target`` may use. None where that is unknown, or more than a share of the pairs."""
    theta = priced(search.costs, search.items, search.dual.best_prices)
    choice, pair = reduced_costs(search.graph, theta, search.dual.best_messages)
    search.incumbent.spend(3 * SETTINGS.entry_work * len(pair))
    room = (target - search.bound()) * (1 + SETTINGS.tight) + 1
    if np.count_nonzero(pair < room) > most * len(pair):
        return None
    rest = fix_by_reduced_cost(search.core, search.graph, choice, pair, room)
    if rest is None:
        return None
    core = reduce(rest.problem, int(target - search.core.constant) + 1)
    search.incumbent.spend(core.work)
    return replace(
        core,
        constant=core.constant + search.core.constant,
        expand=lambda choices: rest.expand(core.expand(choices)),
        restrict=lambda choices: core.restrict(rest.restrict(choices)),
    )

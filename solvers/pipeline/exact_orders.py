"""Branch and bound over the orders of a cut, for small problems: working space, and a search that can be left and resumed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..arrays import VIEWS, Floats, Ints
from ..kernels import bound_rest, explore, fill_tails, views
from .bounds import in_flight
from .chain import Chain, line_length
from .problem import PipelineProblem
from .settings import SETTINGS


class OrderTree(NamedTuple):
    """The state of a search: see ``kernels.order_tree``."""

    ends: Floats  # of each code and microbatch placed
    ready: Floats  # when each device is free
    usage: Floats  # bytes in flight on each device
    tails: Floats  # least seconds from the end of each code and microbatch to the end of the step
    heads: Floats  # least end of each code and microbatch
    begins: Floats  # when the next of each code could begin
    saved: Floats  # by depth: when the device was free before
    until: Floats  # by depth: the soonest end, until which codes are kept back
    vectors: Floats  # times of the nodes remembered
    best: Floats  # the step to be beaten
    count: Ints  # type: ignore[assignment]  # microbatches placed of each code
    flight: Ints  # microbatches of each chunk that room is for
    tight: Ints  # devices without room for everything in flight
    blocked: Ints  # codes kept back, as bits; then those of each device
    open: Ints  # by depth: codes to be tried
    width: Ints  # by depth: how many of them are left
    lines: Ints  # by depth: the code placed
    kept_back: Ints  # by depth: codes that would be kept back, and those that were before
    by_tail: Ints  # each device's codes and microbatches, the longest tail first
    line_ptr: Ints  # where each device's begin
    scalars: Ints
    bucket: Ints  # remembered nodes: the first of each list
    following: Ints  # the next in its list
    keys: Ints  # of each remembered node the codes kept back and the counts, packed into words
    orders: Ints  # of the best step


VIEWS[OrderTree] = views.OrderTree


def is_small(problem: PipelineProblem) -> bool:
    """Whether each code has a bit in one number, and the sets of placed operations are few enough to try."""
    return 3 * problem.total_chunks <= 60 and problem.devices * line_length(problem) <= SETTINGS.most_operations


class OrderSearch:
    """The shortest orders of one cut at a time. The working space serves all cuts of a problem."""

    def __init__(self, problem: PipelineProblem) -> None:
        n, p, m = problem.total_chunks, problem.devices, problem.microbatches
        self.problem, self.operations = problem, p * line_length(problem)
        self.vector = p + 2 * n * m
        words = 2 + 3 * n // max(1, int(55 / math.log2(m + 1)) - 1)
        capacity, codes, devices, depths = SETTINGS.remembered // self.vector, 3 * n, p, (3 * n + 1) * self.operations + 1
        wide = 3 * problem.chunks + 1
        floats = (codes * m, devices, devices, codes * m, codes * m, codes, depths, depths, (capacity + 1) * self.vector, 1)
        ints = (
            codes, n, devices, 1 + devices, depths * wide, depths, depths, 2 * depths, self.operations, devices + 1, 9, SETTINGS.buckets,
            capacity, words * (capacity + 1), self.operations,
        )  # fmt: skip
        arrays: list[Any] = [np.empty(size) for size in floats]
        arrays += [np.zeros(size, dtype=np.int64) for size in ints]
        self.tree = OrderTree(*arrays)
        self.capacity, self.words = capacity, words
        for chunk, place in enumerate(problem.places if is_small(problem) else ()):  # other problems are bounded, not searched
            self.tree.blocked[1 + place] |= 0b111 << 3 * chunk
        self.chain: Chain | None = None

    def load(self, chain: Chain) -> float:
        """Begin with a cut; returns a bound of its step, in seconds."""
        tree, m = self.tree, self.problem.microbatches
        self.chain = chain
        for array in (tree.ready, tree.usage, tree.count, tree.tight):
            array[:] = 0
        tree.blocked[0], tree.bucket[:] = 0, -1
        tree.scalars[:] = (0, 0, 0, 1, self.capacity, self.vector, SETTINGS.buckets, SETTINGS.compared, self.words)
        for chunk, place in enumerate(self.problem.places):
            room, held = float(chain.room[place]), float(chain.held[chunk])
            tree.flight[chunk] = in_flight(room, held, m)
        needed = np.bincount(chain.place, m * chain.held, self.problem.devices)
        tree.tight[:] = needed > chain.room
        fill_tails(chain, tree)
        return float(bound_rest(chain, tree))

    def run(self, nodes: int, best: float) -> bool:
        """Go on for so many nodes; True once no order of the cut takes less than ``best`` seconds, or than what was found."""
        self.tree.best[0] = best
        assert self.chain is not None
        return bool(explore(self.chain, self.tree, nodes))

    @property
    def nodes(self) -> int:
        """Nodes since the cut was loaded."""
        return int(self.tree.scalars[1])

    @property
    def best(self) -> float:
        """The shortest step known, in seconds; its orders are ``tree.orders`` where it was found here."""
        return float(self.tree.best[0])

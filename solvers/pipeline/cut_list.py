"""Branch and bound over cuts and mixes: the complete list of those whose bound is below the incumbent, then their orders, one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..settings import SETTINGS as SOLVERS
from .bounds import bound_cut
from .chain import line_length, make_chain
from .exact_orders import OrderSearch, is_small
from .incumbent import PipelineIncumbent
from .intervals import Intervals, Mix
from .settings import SETTINGS


@dataclass
class Candidate:
    """A cut with a mix for each chunk, and the least seconds that its orders can take."""

    bound: float
    ends: tuple[int, ...]
    mixes: tuple[Mix, ...]


def close(incumbent: PipelineIncumbent, intervals: Intervals, allowed: float) -> None:
    """List the cuts that may be better, and search their orders in rounds of more and more nodes, until none is left or the work is spent.

    The least bound of those that are left is a bound over all cuts. ``allowed``: work, in units.
    """
    problem, stop = incumbent.problem, incumbent.spent + allowed
    if problem.devices * line_length(problem) > SETTINGS.largest_tree:
        return
    listed = Listing(incumbent, intervals).candidates()
    if listed is None:
        return
    search = OrderSearch(problem)
    for candidate in listed:
        candidate.bound = max(candidate.bound, search.load(make_chain(problem, [mix.cost for mix in candidate.mixes])))
        if incumbent.spend(SETTINGS.node_work * search.operations * 2):
            return
    nodes = SETTINGS.first_nodes
    while True:
        listed = sorted((one for one in listed if one.bound < incumbent.step * (1.0 - SOLVERS.tight)), key=lambda one: one.bound)
        incumbent.prove(min((one.bound for one in listed), default=incumbent.step))
        if not listed or incumbent.over or incumbent.spent >= stop or not is_small(problem):
            return
        for candidate in listed:
            if candidate.bound < incumbent.step * (1.0 - SOLVERS.tight) and _explored(incumbent, search, candidate, nodes):
                candidate.bound = math.inf
            if incumbent.over or incumbent.spent >= stop:
                break
        nodes *= SETTINGS.more_nodes


def _explored(incumbent: PipelineIncumbent, search: OrderSearch, candidate: Candidate, nodes: int) -> bool:
    """Search the orders of a cut for so many nodes; True if none is left that is shorter than the incumbent."""
    search.load(make_chain(incumbent.problem, [mix.cost for mix in candidate.mixes]))
    ended = False
    while not ended and search.nodes < nodes:
        before, best = search.nodes, min(incumbent.step, SETTINGS.largest_number)
        ended = search.run(min(SETTINGS.nodes_at_once, nodes - before), best)
        if search.best < best:
            incumbent.offer(candidate.ends, candidate.mixes, search.tree.orders)
        if incumbent.spend(SETTINGS.node_work * search.operations * (search.nodes - before)):
            break
    return ended


class Listing:
    """All cuts and mixes whose bound is below the incumbent, chunk by chunk; what a device's work and bytes rule out early is left out."""

    def __init__(self, incumbent: PipelineIncumbent, intervals: Intervals) -> None:
        self.incumbent, self.intervals, self.problem = incumbent, intervals, incumbent.problem
        self.looked = 0

    def candidates(self) -> list[Candidate] | None:
        """The list; None where it is too long, or mixes were left out."""
        found = []
        for ends, mixes in self._extended((), ()):
            bound = bound_cut(self.problem, [mix.cost for mix in mixes])
            if bound < self.incumbent.step * (1.0 - SOLVERS.tight):
                found.append(Candidate(bound, ends, mixes))
        self.incumbent.spend(SETTINGS.listing_work * self.looked)
        return found if self.looked <= SETTINGS.most_cuts and self.intervals.complete and not self.incumbent.over else None

    def _extended(self, ends: tuple[int, ...], mixes: tuple[Mix, ...]) -> Iterator[tuple[tuple[int, ...], tuple[Mix, ...]]]:
        problem, begin = self.problem, ends[-1] if ends else 0
        left = problem.total_chunks - len(ends) - 1
        for end in range(begin + 1, len(problem.layers) - left + 1) if left else (len(problem.layers),):
            possible = False
            for mix in self.intervals.mixes(begin, end):
                self.looked += 1
                if self.looked > SETTINGS.most_cuts:
                    return
                longer = (*mixes, mix)
                if not self._possible(longer):
                    continue
                possible = True
                if left:
                    yield from self._extended((*ends, end), longer)
                else:
                    yield (*ends, end), longer
            if not possible:  # with one layer more every mix has more seconds and bytes
                return

    def _possible(self, mixes: tuple[Mix, ...]) -> bool:
        """Whether the last chunk's device may have it: H of its first chunk and its work are below the incumbent; one microbatch fits."""
        problem, chunk = self.problem, len(mixes) - 1
        device = problem.places[chunk]
        first = problem.places.index(device)
        before = sum(mix.cost.forward for mix in mixes[:first]) + sum(problem.hops[:first])
        if problem.training and not problem.split:
            before += sum(mix.cost.backward for mix in mixes[:first]) + sum(problem.hops[:first])
        own = [mix for mix, place in zip(mixes, problem.places, strict=False) if place == device]
        if before + problem.microbatches * sum(mix.cost.seconds for mix in own) >= self.incumbent.step * (1.0 - SOLVERS.tight):
            return False
        return sum(mix.cost.rest + mix.cost.held for mix in own) <= problem.most_bytes



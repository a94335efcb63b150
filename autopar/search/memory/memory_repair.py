"""Memory repair: bytes that a schedule holds beyond the problem's count are left free in the next solve.

The problem counts less memory than any schedule takes, so that its bound is true. So a solution that fits there may not fit as a schedule.
Cover rows repair that, only at the times at which the schedule is over the limit. First they count what pairs of choices hold
(``pair_memory``). Then they reserve the bytes that are still missing. Where nothing is feasible with the reserve, half of its last increase
is tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autopar.effort import Budget
from autopar.schedule import Assignment, Schedule
from autopar.schedule.liveness import held
from autopar.search.ilp.model import Model
from autopar.search.ilp.pair_memory import PairCost, find_pairs
from autopar.search.settings import RESERVE_GRAIN
from autopar.search.solving import solve
from autopar.solvers import INFINITE, Problem


def count_bytes(problem: Problem, choices: np.ndarray, end: int) -> np.ndarray:
    """Bytes that the problem counts at each time before ``end``, for one choice per node; shape [end]."""
    flat = problem.node_ptr[:-1] + choices
    counts = problem.item_ptr[flat + 1] - problem.item_ptr[flat]
    items = np.repeat(problem.item_ptr[flat], counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    change = np.zeros(end + 1, dtype=np.int64)
    np.add.at(change, np.minimum(problem.item_begin[items], end), problem.item_usage[items])
    np.add.at(change, np.minimum(problem.item_end[items], end), -problem.item_usage[items])
    return np.cumsum(change)[:end]


def measure_held_bytes(samples: Sequence[tuple[float, Schedule]], optimizer: str, times: Mapping[str, int]) -> np.ndarray:
    """The most bytes that schedules hold at each time of the problem: while an operator runs, and since the one before it."""
    levels = [weight * _measure_held_bytes(schedule, optimizer, times) for weight, schedule in samples]
    found: np.ndarray = np.rint(np.sum(levels, axis=0)).astype(np.int64)
    return found


def _measure_held_bytes(schedule: Schedule, optimizer: str, times: Mapping[str, int]) -> np.ndarray:
    time = max(times.values(), default=-1) + 1
    found = np.zeros(time + 1, dtype=np.int64)
    levels = held(schedule, optimizer)
    for item, level in zip(reversed(schedule.instructions), reversed(levels), strict=True):
        if item.kind == "run":
            time = times.get(item.of, time)  # a recomputation stands just before the operator that needs it
        found[time] = max(found[time], level)
    return found


class CoverRows:
    """Bytes that are reserved at each time of the problem, and the pairs of choices that are counted there.

    Args:
        limit: bytes per rank that schedules are to keep to.
        pairs: whether pairs are counted; in a large problem they are too many.
    """

    def __init__(self, model: Model, limit: int, *, pairs: bool = True) -> None:
        self.model, self.limit, self.counts_pairs, self.op_times = model, limit, pairs, model.op_times
        self.reserved = np.zeros(len(model.space.graph.ops) + 1, dtype=np.int64)
        self.last_solved = self.reserved
        self.pairs: dict[int, list[PairCost]] = {}

    def apply(self, problem: Problem) -> Problem:
        """The problem with a node for each pair, and a node of one choice that uses the reserved bytes."""
        pairs = [pair for found in self.pairs.values() for pair in found]
        changes = np.flatnonzero(np.diff(self.reserved, prepend=0, append=0))
        free = [(int(begin), int(end), int(self.reserved[begin])) for begin, end in pairwise(changes) if self.reserved[begin] > 0]
        if not pairs and not free:
            return problem
        edges = [
            edge
            for number, pair in enumerate(pairs, problem.num_nodes)
            for edge in ((pair.source, number, pair.from_source), (number, pair.target, pair.to_target))
        ]
        items = [[[(pair.time, pair.time + 1, level)] if level else [] for level in pair.levels] for pair in pairs]
        return problem.extended([np.zeros(len(levels), dtype=np.int64) for levels in (*items, [free])], edges, [*items, [free]])

    def complete(self, choices: np.ndarray) -> np.ndarray:
        """The choices with those of the added nodes."""
        pairs = [pair for found in self.pairs.values() for pair in found]
        if not pairs and not self.reserved.any():
            return choices
        return np.append(choices, [*(pair.least_choice(choices) for pair in pairs), 0])

    def learn(self, problem: Problem, choices: np.ndarray, samples: Sequence[tuple[float, Schedule]]) -> bool:
        """Learns from a schedule of ``choices`` that does not fit. Whether the rows ask for more than before.

        Args:
            problem: without the added nodes.
            samples: schedules of the solution, with their weights (``ScheduledPlan.samples``).
        """
        space = self.model.space
        real = measure_held_bytes(samples, space.optimizer, self.op_times)
        known = count_bytes(self.apply(problem), self.complete(choices), len(real)) - self.reserved
        over = real > self.limit
        learnt = False
        self.last_solved = self.reserved
        for time in np.flatnonzero(over).tolist() if self.counts_pairs else ():
            if time not in self.pairs and time < len(self.reserved) - 1:
                self.pairs[time] = find_pairs(self.model, choices, time, self.op_times)
                learnt |= bool(self.pairs[time])
        if learnt:
            return True
        step = max(self.limit // RESERVE_GRAIN, 1)
        missing = -(-(real - known) // step) * step
        self.reserved = np.where(over, np.maximum(missing, self.reserved), self.reserved)
        return bool((self.reserved > self.last_solved).any())

    def ease(self) -> bool:
        """Halves the last increase of the reserve, which left no solution. Whether that changes anything."""
        before = self.reserved
        self.reserved = (self.last_solved + self.reserved) // 2
        return bool((before - self.reserved > self.limit // RESERVE_GRAIN).any())


def solve_fixed(
    model: Model, problem: Problem, assignment: Assignment, seed: int, budget: Budget, *, gap: float = 0.01
) -> np.ndarray | None:  # fmt: skip
    """The cheapest choices, one per node of the problem, with the input specs and the strategies of an assignment.

    What the assignment leaves open is solved. None where the search does not offer its choices, or no reshards fit.

    Args:
        budget, gap: where the solve stops.
    """
    costs = problem.costs.copy()
    space = model.space
    for place, number in enumerate(model.restrict(np.arange(len(model.nodes)))):
        node = model.nodes[number]
        first, last = problem.node_ptr[place], problem.node_ptr[place + 1]
        offered: Sequence[object]
        wanted: object
        if node.kind == "input":
            offered, wanted = node.resting, assignment.inputs.get(node.name)
        elif node.kind == "op":
            offered, wanted = space.op_choices(space.graph.op[node.name]).strategies, assignment.strategies.get(node.name)
        else:
            continue
        if wanted is None:
            continue
        if wanted not in offered:
            return None
        costs[first:last][[choice != wanted for choice in offered]] = INFINITE
    return solve(replace(problem, costs=costs), budget, gap=gap, seed=seed).choices

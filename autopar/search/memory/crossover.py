"""Crossover with rematerialization: the strategies of a few plans recombined under a memory limit.

With the strategies of a few plans alone the integer problem stays small for deep models. It chooses whose strategy an operator takes, how
tensors are resharded, and what is kept or computed again. Folded layers keep alike.

- An answer that fills the memory leaves its schedule no room to prefetch, one that leaves room recomputes more: several shares of the limit
  are tried.
- Each answer is scheduled, and its exposed collectives price the next.
- Learned prices have local optima, so those of full overlap are tried beside them.
- Where no schedule fits, what it holds beyond the limit is left free (``memory_repair``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.effort import Budget
from autopar.schedule import Assignment
from autopar.schedule.limit_search import best_schedule
from autopar.schedule.scheduled_plan import Sample, ScheduledPlan
from autopar.search.choices.space import Space
from autopar.search.folding.fold import Folding
from autopar.search.folding.tied_model import tie_model
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import Model, Weights
from autopar.search.ilp.overlap import LearnedOverlap
from autopar.search.memory.memory_repair import CoverRows
from autopar.search.settings import LIMIT_SHARES, MORE_TRIES, NEAR, ROUNDS, SOLVE_WORK
from autopar.search.solving import solve
from autopar.search.thresholds import USUAL_THRESHOLDS, Thresholds


@dataclass(frozen=True)
class CrossoverRequest:
    """The request of a crossover.

    Args:
        limit: bytes per rank.
        recompute_times: number of times of a recomputation that are told apart; 0: there is none.
        tries: limits of the schedule passes that are tried for each solution.
        budget: work of all solves and schedules.
        shares: of the limit, that solutions may hold before they are scheduled.
        stops_at_first: the first plan that fits is enough.
    """

    limit: int
    recompute_times: int
    tries: int
    seed: int
    budget: Budget
    shares: tuple[float, ...] = LIMIT_SHARES
    stops_at_first: bool = False
    thresholds: Thresholds = USUAL_THRESHOLDS


def solve_restricted(
    space: Space, plans: Sequence[Assignment], prices: LearnedOverlap, request: CrossoverRequest, folding: Folding | None = None,
    best: ScheduledPlan | None = None,
) -> tuple[ScheduledPlan | None, LearnedOverlap]:  # fmt: skip
    """The best schedule found with the strategies of ``plans``, None without any; and the prices learnt from the last schedule.

    The schedule fits if any schedule found does.

    Args:
        space: of the graph of ``plans``.
        folding: set if that graph is a folded one.
        best: the best schedule known.
    """
    alike = folding.representatives if folding is not None else None
    model = build_model(space.restricted_to_plans(plans, alike), recompute_times=request.recompute_times, alike=alike)
    if folding is not None:
        tied = tie_model(model, folding, request.thresholds)
        if tied is None:
            return None, prices
        model = tied
    problem, may_try_optimistic = RestrictedProblem(model, request), True
    for share in request.shares:
        found = problem.run(prices, share, best)
        if found is not None:
            best = found if found.better(best, request.limit) else best
            prices = prices.learn(found.schedule, found.slots)
        other: ScheduledPlan | None = None
        if may_try_optimistic and found is not None:
            may_try_optimistic, other = False, problem.run(LearnedOverlap.optimistic(prices.slowdown), share, best)
        if other is not None and other.better(best, request.limit):
            best, prices = other, prices.learn(other.schedule, other.slots)
        if request.stops_at_first and best is not None and best.memory.peak <= request.limit:
            break
    return best, prices


class RestrictedProblem:
    """One problem, solved under one share of the limit after another."""

    def __init__(self, model: Model, request: CrossoverRequest) -> None:
        self.model, self.request = model, request
        self.reserves = CoverRows(model, request.limit, pairs=False)
        self.start: np.ndarray | None = None

    def run(self, prices: Weights, share: float, best: ScheduledPlan | None) -> ScheduledPlan | None:
        """The best schedule of solutions that hold ``share`` of the limit. It ends with the first that fits."""
        model, request, found = self.model, self.request, None
        problem, _ = model.problem(int(share * request.limit), prices)
        for _ in range(ROUNDS):
            if request.budget.over:
                break
            solution = solve(
                self.reserves.apply(problem), request.budget.at_most(SOLVE_WORK), gap=NEAR, seed=request.seed,
                start=None if self.start is None else self.reserves.complete(self.start),
            )  # fmt: skip
            if solution.choices is None:
                if not self.reserves.ease():
                    break
                continue
            self.start = solution.choices[: problem.num_nodes]
            answer = self._schedule(self.start, best)
            found = answer if answer.better(found, request.limit) else found
            if answer.memory.peak <= request.limit or not self.reserves.learn(problem, self.start, answer.samples):
                break
        return found

    def _schedule(self, choices: np.ndarray, best: ScheduledPlan | None) -> ScheduledPlan:
        model, request = self.model, self.request
        assignment = decode_assignment(model, model.expand(choices))
        return best_schedule(
            model.planned_graph, assignment, model.space.machine, model.space.optimizer, request.limit,
            tries=request.tries * (MORE_TRIES if best is None else 1),
            start=best.limits if best is not None else None, incumbent_seconds=best.placed_seconds if best is not None else math.inf,
            samples=model.short_samples(assignment) or (Sample(1.0, model.planned_graph, model.unfold(assignment)),), budget=request.budget,
        )  # fmt: skip

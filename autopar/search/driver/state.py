"""The state of a search on one model: incumbent, bound, and the solve and the schedule by which phases improve them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.effort import Budget
from autopar.schedule import Assignment, Limits
from autopar.schedule.tuning import LimitSearch, Sample, ScheduledPlan, reordered
from autopar.search.bounds.surrogate import floor_of_model
from autopar.search.folding.tied_model import TiedModel
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import Model, Weights
from autopar.search.ilp.overlap import LearnedOverlap
from autopar.search.memory.crossover import CrossoverRequest, solve_restricted
from autopar.search.memory.memory_repair import CoverRows
from autopar.search.settings import (
    CLOSE_GAP,
    CROSSOVER_MOMENTS,
    ESTIMATE_ERROR,
    FINAL_MOVES,
    FIRST_SOLVE_WORK,
    GAIN,
    IDLE_ROUNDS,
    LARGE_ENTRIES,
    LARGE_TRIES,
    LEAST_SOLVE_WORK,
    LIMIT_SHARES,
    LONG_GRAPH,
    LONG_TRIES,
    NEAR_BEST,
    NEAR_LIMIT,
    REMEMBERED_PLANS,
    ROOMY,
    SMALL_ENTRIES,
    SOLVE_SHARE,
    TIES,
    UNLIKELY_PLAN,
    USUAL_TRIES,
)
from autopar.search.solving import solve_interruptibly
from autopar.search.telemetry import Telemetry
from solvers import INTERRUPTED, Problem, Solution, Status

UNLIMITED = 2**62
"""Bytes that no plan needs."""

Progress = Callable[[float, float, float, float], None]
"""Called with incumbent seconds (infinite without one), bound seconds, gap, elapsed seconds."""


@dataclass(frozen=True)
class SearchRequest:
    """The arguments of ``find_plan``, without graph, machine and pins."""

    limit: int
    optimizer: str
    budget: Budget
    gap: float
    seed: int
    progress: Progress | None
    baselines: bool
    recompute: bool
    telemetry: Telemetry
    bounds: list[float] = field(default_factory=list)
    """Seconds of bounds that are proved already, for all plans whatever memory they need."""
    proves: bool = True
    """Whether the model has all choices there are, so that its bound holds for every plan."""
    draft: bool = False
    """Whether the plan is a warm start of another search: deep schedules may stay extrapolated."""


class SearchState:
    """The best schedule and the best bound so far, and what finds others."""

    def __init__(self, model: Model, asked: SearchRequest, again: bool) -> None:
        self.model, self.limit, self.gap, self.seed, self.progress = model, asked.limit, asked.gap, asked.seed, asked.progress
        self.budget, self.total_work, self.telemetry, self.interrupted = asked.budget, asked.budget.left, asked.telemetry, False
        self.apart = CROSSOVER_MOMENTS if again else 0
        """Number of times of a recomputation that are told apart, in problems that have recomputation from the start."""
        self.problem, self.unit = model.problem(asked.limit)
        self.sizes = {
            "nodes": len(model.nodes), "choices": len(self.problem.costs), "edges": len(self.problem.edges),
            "edge_entries": len(self.problem.edge_costs),
        }  # fmt: skip
        self.slowdown = model.space.machine.hardware.overlap_slowdown
        self.is_folded = isinstance(model, TiedModel)
        self.roomy = True
        """Whether every solution without the limit has respected it so far."""
        self.again = again and not self.is_folded
        """Whether recomputation may still come into the model."""
        self.answers: list[Assignment] = []
        self.solutions: list[tuple[Model, np.ndarray]] = []
        """The model and the choices of each solution so far; shape [nodes]."""
        self.short = False
        """Whether a solution of a folded problem did not fit. Folded problems price memory roughly, so the whole problem is solved instead.
        """
        self.large = len(self.problem.edge_costs) * len(model.planned_graph.ops) / max(len(model.space.graph.ops), 1) > LARGE_ENTRIES
        self.long = len(model.planned_graph.ops) >= LONG_GRAPH
        self.small = len(self.problem.edge_costs) <= SMALL_ENTRIES and not self.long
        self.keeping = False
        """Whether crossover makes solutions fit, because the problem does not count what backward keeps."""
        self.tries, self.idle = (LARGE_TRIES, 1) if self.large else (LONG_TRIES if self.long else USUAL_TRIES, IDLE_ROUNDS)
        self.reserves = CoverRows(model, asked.limit, pairs=not self.large)
        self.best: ScheduledPlan | None = None
        self.close: list[ScheduledPlan] = []
        """Incumbents of before that may be the best at full depth, as far as estimates can tell."""
        self.polished: ScheduledPlan | None = None
        """The incumbent that last had more limits tried."""
        self.proves, self.draft = asked.proves, asked.draft
        self.bound, self.incumbent_method, self.seconds = max([floor_of_model(model) if asked.proves else 0.0, *asked.bounds]), "", 0.0
        self.aim, self.claims = self.bound, list[tuple[float, float, Weights, np.ndarray]]()
        self.weights: Weights | None = None
        """The weights that gave ``aim``."""
        self.proving = 0.0
        """Work seconds of the longest solve for a bound."""
        self.baselines: tuple[ScheduledPlan, ...] = ()
        self.tunings: deque[tuple[bool, LimitSearch]] = deque(maxlen=REMEMBERED_PLANS)
        """The limit searches of the last assignments, and whether at full depth."""
        self.plain: ScheduledPlan | None = None
        """The best plan without limit and without recomputation, if it does not fit."""
        self.warm_start: np.ndarray | None = None
        self.last_solution: Solution | None = None
        self.has_gained = False
        """Whether the last solve was a gain."""
        self.proved = False
        """Whether no choices respect the limit."""

    @property
    def work_left(self) -> float:
        """Work seconds left of the whole search; 0 after the time limit."""
        return self.budget.left

    def part(self, share: float) -> Budget:
        """A budget of ``share`` of the work left."""
        return self.budget.at_most(share * self.work_left)

    @property
    def open_gap(self) -> float:
        """The gap so far; infinite without a plan that fits."""
        if self.best is None or self.best.memory.peak > self.limit:
            return math.inf
        return (self.best.seconds - self.bound) / self.best.seconds if self.best.seconds > 0 else 0.0

    @property
    def has_fitting_plan(self) -> bool:
        """Whether there is a plan within the memory limit."""
        return self.best is not None and self.best.memory.peak <= self.limit

    def standing(self) -> tuple[float, float]:
        """Step seconds of the best plan that fits, infinite without one, and bound seconds."""
        return (self.best.seconds if self.has_fitting_plan and self.best is not None else math.inf), self.bound

    def is_done(self) -> bool:
        """Whether nothing is left to do: no work, no gap, or a folded model whose solutions do not fit."""
        return self.work_left <= 0 or self.short or self.open_gap <= self.gap

    def offer(self, found: ScheduledPlan, method: str) -> bool:
        """Makes a schedule the incumbent if it is better. Whether it is a gain."""
        known = self.best
        rivals = known is not None and not known.estimated and found.seconds > known.seconds * (1 - ESTIMATE_ERROR)
        found = self.confirm(found) if rivals or self._is_near_limit(found) else found
        if not found.better(self.best, self.limit):
            return False
        gain = self.best is None or found.seconds < self.best.seconds * (1 - GAIN) or self.best.memory.peak > self.limit
        self.best, self.incumbent_method = found, method
        self.budget.meter.has_plan |= self.has_fitting_plan
        self.close = [one for one in self.close if not one.estimated or one.seconds <= found.seconds * (1 + ESTIMATE_ERROR)]
        self.close = [*(self.close if found.estimated else ()), found]
        return gain

    def settle_best(self) -> None:
        """Schedules the incumbent at full depth, then others for as long as they may be better."""
        while self.best is not None and self.best.estimated and not self.draft:
            exact, before = self.schedule_at_full_depth(self.best), self.best
            self.close = [exact if one is before else one for one in self.close]
            self.best = self.close[0]
            for one in self.close[1:]:
                self.best = one if one.better(self.best, self.limit) else self.best

    def finish(self) -> None:
        """Improves the order of the incumbent by local search."""
        assert self.best is not None
        self.best = self.improve_order(self.best)

    def improve_order(self, found: ScheduledPlan, effort: int = FINAL_MOVES) -> ScheduledPlan:
        """A plan after local search with ``effort`` times the usual moves, if anything is left to gain."""
        late = self.interrupted or (self.long and self.work_left <= 0)
        if self.draft or late or found.memory.peak > self.limit or self.open_gap <= self.gap:
            return found
        return reordered(found, self.model.space.machine, self.model.space.optimizer, self.limit, effort, self.budget)

    def solve(self, weights: Weights, gap: float, *, proves: bool = False, limit: int | None = None) -> ScheduledPlan | None:
        """Solves once, schedules the solution and offers it; None without a solution.

        Args:
            proves: the optimum under these weights bounds every step; nothing is reserved.
            limit: bytes per rank, if other than the search's; nothing is reserved.
        """
        solution = self.solve_choices(weights, gap, proves=proves, limit=limit)
        if solution is None:
            return None
        limits: Limits | None = self.best.limits if self.best is not None else None
        beside = self.best.placed_seconds if self.best is not None and self.best.memory.peak <= self.limit else math.inf
        tries = 0 if proves and self.is_folded and self.large else self.tries  # solves for bounds are cheap, schedules are not
        begun = 0 if proves and self.long else tries
        found = self.schedule(self.answers[-1], limits, begun, beside)
        if begun < tries and found.placed_seconds <= UNLIKELY_PLAN * beside:
            found = self.schedule(self.answers[-1], limits, tries, beside)
        self.short |= self.is_folded and found.memory.peak > self.limit
        self.has_gained = self.offer(found, solution.method)
        if solution.message == INTERRUPTED:
            raise KeyboardInterrupt
        if self.keeping and found.memory.peak > self.limit:
            prices = weights if isinstance(weights, LearnedOverlap) else LearnedOverlap.first(self.slowdown)
            return self.recombine_one(found, prices) or found
        return found

    def solve_choices(self, weights: Weights, gap: float, *, proves: bool = False, limit: int | None = None) -> Solution | None:
        """Solves once, without a schedule; None without a solution.

        The choices are then in ``warm_start``, and their assignment is the last of ``answers``. The caller checks whether Ctrl-C ended the
        solve.
        """
        began, self.has_gained = self.budget.meter.spent, False
        space = self.model.space
        bytes_allowed = UNLIMITED if self.is_folded else self.limit if limit is None else limit
        problem, unit = self.model.problem(bytes_allowed, weights)
        asked, start = problem, self.warm_start
        if not proves and limit is None and not self.is_folded:
            asked = self.reserves.apply(problem)
            start = self.reserves.complete(start) if start is not None else None

        def report(incumbent: float | None, bound: float, reached: float, seconds: float) -> None:
            if self.progress is not None:
                known = max(self.bound, bound * unit / (1 + TIES)) if proves and not self.is_folded else self.bound
                best = self.best.seconds if self.best is not None else math.inf
                self.progress(best, known, 1 - known / best if 0 < best < math.inf else 1.0, self.budget.meter.seconds)

        most = self.total_work
        if space.machine.overlaps:
            most *= SOLVE_SHARE if self.warm_start is not None else 0.5
        if self.is_folded and start is not None:
            start = self.model.restrict(start)

        def answer(problem: Problem) -> Solution:
            turn = self.budget.at_most(min(self.work_left, most)).at_least(LEAST_SOLVE_WORK if self.has_fitting_plan else FIRST_SOLVE_WORK)
            patient = self.small  # in larger problems other prices gain sooner
            found = solve_interruptibly(problem, turn, gap=gap, seed=self.seed, start=start, progress=report, patient=patient)
            if found.message == INTERRUPTED and found.choices is None:
                raise KeyboardInterrupt
            return found

        solution: Solution | None = None
        if self.roomy and asked.limit == self.limit and self.best is not None and self.best.memory.peak <= ROOMY * self.limit:
            solution = answer(replace(asked, limit=None))
            self.roomy = solution.peak_usage is not None and solution.peak_usage <= self.limit
            if solution.message == INTERRUPTED and not self.roomy:
                raise KeyboardInterrupt
        self.last_solution = solution = solution if solution is not None and self.roomy else answer(asked)
        if proves:
            self.proving = max(self.proving, self.budget.meter.spent - began)
            bound = solution.bound * unit / (1 + TIES)
            if bound > self.aim:
                self.aim, self.weights = bound, weights
            if self.is_folded and solution.objective is not None and solution.choices is not None:
                self.claims.append((bound, solution.objective * unit, weights, self.model.expand(solution.choices)))
            elif not self.is_folded:
                self.bound = max(self.bound, self.aim)
        if asked is problem and limit is None:
            self.proved = self.proved or solution.status is Status.INFEASIBLE
        if solution.choices is None:
            return None
        self.warm_start = self.model.expand(solution.choices) if self.is_folded else solution.choices[: len(self.model.nodes)]
        self.answers.append(decode_assignment(self.model, self.warm_start))
        self.solutions.append((self.model, self.warm_start))
        return solution

    def recombine(
        self,
        plans: Sequence[Assignment],
        prices: LearnedOverlap,
        budget: Budget,
        shares: tuple[float, ...] = LIMIT_SHARES,
        best: ScheduledPlan | None = None,
    ) -> tuple[ScheduledPlan | None, LearnedOverlap]:
        """Crossover of plans: the schedule if it fits, and the prices learnt.

        Args:
            best: the best extrapolated schedule of earlier crossovers, to compare estimates with estimates.
        """
        model = self.model
        wanted = CrossoverRequest(self.limit, self.apart, self.tries, self.seed, budget.at_least(1.0), shares, self.draft)
        found, prices = solve_restricted(model.space, plans, prices, wanted, model.folding if isinstance(model, TiedModel) else None, best)
        if found is None or found.memory.peak > self.limit:
            return None, prices
        self.has_gained |= self.offer(found, "auto")
        return found, prices

    def recombine_one(self, plan: ScheduledPlan, prices: LearnedOverlap) -> ScheduledPlan | None:
        """Crossover of one plan: its strategies with less kept, if that fits."""
        return self.recombine((plan.assignment,), prices, self.budget.at_most(min(self.work_left, self.total_work * SOLVE_SHARE)))[0]

    def schedule(self, assignment: Assignment, start: Limits | None, tries: int, beside: float = math.inf) -> ScheduledPlan:
        """The best schedule of an assignment in a few tries. Of a deep graph it is extrapolated, unless memory is near the limit."""
        found = self._schedule(assignment, False, start, tries, beside, CLOSE_GAP)
        return self.schedule_at_full_depth(found) if self._is_near_limit(found) else found

    def _is_near_limit(self, found: ScheduledPlan) -> bool:
        """Whether memory is so near the limit that an extrapolated schedule does not show whether it fits."""
        return found.estimated and not self.draft and abs(found.memory.peak - self.limit) < NEAR_LIMIT * self.limit

    def confirm(self, found: ScheduledPlan) -> ScheduledPlan:
        """The plan scheduled at full depth, if it may be the best."""
        hopeful = replace(found, seconds=found.seconds * (1 - NEAR_BEST))
        return self.schedule_at_full_depth(found) if found.estimated and not self.draft and hopeful.better(self.best, self.limit) else found

    def schedule_at_full_depth(self, found: ScheduledPlan) -> ScheduledPlan:
        """The plan scheduled at full depth, under its own limits."""
        return self._schedule(found.assignment, True, found.limits, tries=0)

    def _schedule(
        self, assignment: Assignment, exact: bool, start: Limits | None, tries: int, beside: float = math.inf, gain: float = 0.0
    ) -> ScheduledPlan:  # fmt: skip
        """Tries limits for an assignment. The limits that were tried for it before count."""
        known = next((tuning for depth, tuning in self.tunings if depth == exact and tuning.assignment == assignment), None)
        if known is None:
            model, space, graph = self.model, self.model.space, self.model.planned_graph
            samples = (() if exact else model.short_samples(assignment)) or (Sample(1.0, graph, model.unfold(assignment)),)
            known = LimitSearch(assignment, samples, space.machine, space.optimizer, self.limit, budget=self.budget)
            self.tunings.append((exact, known))
        return known.run(start, tries, beside, gain, improve=not self.long)

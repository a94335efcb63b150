"""The state of a search on one model: incumbent, bound, and the solve and the schedule by which phases improve them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.cost_models import UNLIMITED
from autopar.effort import Budget
from autopar.schedule import Assignment, Limits
from autopar.schedule.limit_search import LimitSearch, expand_plan, improve_plan
from autopar.schedule.scheduled_plan import Sample, ScheduledPlan
from autopar.search.bounds.surrogate import floor_of_model
from autopar.search.driver.candidates import CandidatePool
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
    GAIN,
    IDLE_ROUNDS,
    LARGE_TRIES,
    LEAST_SOLVE_WORK,
    LIMIT_SHARES,
    LONG_TRIES,
    NEAR,
    REMEMBERED_PLANS,
    SOLVE_SHARE,
    TIES,
    USUAL_TRIES,
)
from autopar.search.solving import solve_interruptibly
from autopar.search.telemetry import Telemetry
from autopar.search.thresholds import USUAL_THRESHOLDS, Thresholds
from autopar.solvers import INTERRUPTED, Problem, Solution, Status

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
    """Seconds of bounds that are proved already, for all plans within the limit."""
    proves: bool = True
    """Whether the model has all choices there are, so that its bound holds for every plan."""
    draft: bool = False
    """Whether the plan is a warm start of another search: deep schedules may stay extrapolated."""
    thresholds: Thresholds = USUAL_THRESHOLDS
    candidates: int = 1
    """Number of distinct plans in the result, for runs that measure them."""


@dataclass(frozen=True)
class ProblemSize:
    """The size class of a problem, and what a search spends on one solution of it.

    Args:
        is_small, is_large: by the edge entries of the problem; of a folded one, of the whole graph's in proportion.
        is_long: by the operators of the planned graph. Its schedules take long.
        tries: limits of the schedule passes that are tried for one solution.
        patience: rounds without a gain after which prices or weights are left alone.
    """

    is_small: bool
    is_large: bool
    is_long: bool
    tries: int
    patience: int

    @staticmethod
    def measure(model: Model, problem: Problem, thresholds: Thresholds) -> ProblemSize:
        """The size of a model's problem."""
        entries, operators = len(problem.edge_costs), len(model.planned_graph.ops)
        is_large = entries * operators / max(len(model.space.graph.ops), 1) > thresholds.large_entries
        is_long = operators >= thresholds.long_graph
        is_small = entries <= thresholds.small_entries and not is_long
        if is_large:
            return ProblemSize(is_small, is_large, is_long, LARGE_TRIES, 1)
        return ProblemSize(is_small, is_large, is_long, LONG_TRIES if is_long else USUAL_TRIES, IDLE_ROUNDS)


@dataclass
class Incumbent:
    """The best plan so far.

    Args:
        plan: the plan; None before the first.
        method: the method that found it.
        contenders: plans that may be the best at full depth, as far as estimates can tell; the incumbent is the last.
        polished: the incumbent that last had more limits tried.
    """

    plan: ScheduledPlan | None = None
    method: str = ""
    contenders: list[ScheduledPlan] = field(default_factory=list)
    polished: ScheduledPlan | None = None


@dataclass
class MemoryPolicy:
    """How a search keeps to its memory limit, and what it has learnt of that.

    Args:
        cover_rows: bytes reserved in the problem for schedules.
        may_recompute: recomputation may still come into the model.
        recompute_times: number of times of a recomputation that are told apart by crossover; 0: there is none.
        repairs_by_crossover: crossover makes solutions fit, because the problem does not count what backward keeps.
        is_loose: every solution without the limit has respected it.
        is_short: a solution of a folded problem did not fit. Such a problem prices memory roughly, so the whole one is solved instead.
        is_infeasible: no choices respect the limit.
        free_plan: the best plan without limit and without recomputation, if it does not fit.
    """

    cover_rows: CoverRows
    may_recompute: bool
    recompute_times: int
    repairs_by_crossover: bool = False
    is_loose: bool = True
    is_short: bool = False
    is_infeasible: bool = False
    free_plan: ScheduledPlan | None = None


@dataclass
class BoundClaims:
    """Bounds of the solves so far. Those of tied layers are claims, until they are proved for free layers.

    Args:
        bound: seconds of the best bound, claimed or proved.
        weights: the weights that gave it.
        pending: claims as bound, cost of the solution, weights and choices.
        longest_solve: work seconds of the longest solve for a bound.
    """

    bound: float
    weights: Weights | None = None
    pending: list[tuple[float, float, Weights, np.ndarray]] = field(default_factory=list)
    longest_solve: float = 0.0


class SearchState:
    """The best schedule and the best bound so far, and the steps that find others.

    Args:
        may_recompute: backward may recompute tensors of forward.
    """

    def __init__(self, model: Model, asked: SearchRequest, may_recompute: bool) -> None:
        self.model, self.request, self.limit = model, asked, asked.limit
        self.budget, self.total_work, self.telemetry, self.interrupted = asked.budget, asked.budget.left, asked.telemetry, False
        self.slowdown = model.space.machine.hardware.overlap_slowdown
        self.is_folded = isinstance(model, TiedModel)
        self.problem, self.unit = model.problem(asked.limit)
        self.sizes = {
            "nodes": len(model.nodes), "choices": len(self.problem.costs), "edges": len(self.problem.edges),
            "edge_entries": len(self.problem.edge_costs),
        }  # fmt: skip
        self.size = ProblemSize.measure(model, self.problem, asked.thresholds)
        rows = CoverRows(model, asked.limit, pairs=not self.size.is_large)
        self.memory = MemoryPolicy(rows, may_recompute and not self.is_folded, CROSSOVER_MOMENTS if may_recompute else 0)
        self.incumbent, self.pool = Incumbent(), CandidatePool(asked.candidates)
        self.bound, self.seconds = max([floor_of_model(model) if asked.proves else 0.0, *asked.bounds]), 0.0
        self.claims = BoundClaims(self.bound)
        self.answers: list[Assignment] = []
        self.solutions: list[tuple[Model, np.ndarray]] = []
        """The model and the choices of each solution so far; shape [nodes]."""
        self.baselines: tuple[ScheduledPlan, ...] = ()
        self.limit_searches: deque[tuple[bool, LimitSearch]] = deque(maxlen=REMEMBERED_PLANS)
        """The limit searches of the last assignments, and whether at full depth."""
        self.warm_start: np.ndarray | None = None
        self.last_solution: Solution | None = None
        self.tied_seconds = 0.0
        """Increase of the objective for equal layers to lie alike."""
        self.free_solution: tuple[Model, Weights, Solution] | None = None
        """The last solution without a memory limit. Where it respects the limit, it is also the solution within the limit."""
        self.has_gained = False
        """Whether the last solve was a gain."""

    @property
    def best(self) -> ScheduledPlan | None:
        """The plan of the incumbent."""
        return self.incumbent.plan

    @property
    def work_left(self) -> float:
        """Work seconds left of the whole search; 0 after the time limit."""
        return self.budget.left

    @property
    def open_gap(self) -> float:
        """The gap so far; infinite without a plan that fits."""
        return self.open_gap_of(self.bound)

    def open_gap_of(self, bound: float) -> float:
        """The gap to a bound in seconds; infinite without a plan that fits."""
        if self.best is None or self.best.memory.peak > self.limit:
            return math.inf
        return (self.best.seconds - bound) / self.best.seconds if self.best.seconds > 0 else 0.0

    @property
    def has_fitting_plan(self) -> bool:
        """Whether there is a plan within the memory limit."""
        return self.best is not None and self.best.memory.peak <= self.limit

    def standing(self) -> tuple[float, float]:
        """Step seconds of the best plan that fits, infinite without one, and bound seconds."""
        return (self.best.seconds if self.has_fitting_plan and self.best is not None else math.inf), self.bound

    def is_done(self) -> bool:
        """Whether nothing is left to do: no work, no gap, or a folded model whose solutions do not fit."""
        return self.work_left <= 0 or self.memory.is_short or self.open_gap <= self.request.gap

    def offer(self, found: ScheduledPlan, method: str) -> bool:
        """Makes a schedule the incumbent if it is better. Whether it is a gain."""
        known = self.best
        rivals = known is not None and not known.estimated and found.seconds > known.seconds * (1 - ESTIMATE_ERROR)
        found = self.confirm(found) if rivals or self._is_near_limit(found) else found
        if method != "baseline":  # they are candidates under names of their own
            self.pool.add(found, self.limit)
        if not found.better(self.best, self.limit):
            return False
        gain = self.best is None or found.seconds < self.best.seconds * (1 - GAIN) or self.best.memory.peak > self.limit
        self.incumbent.plan, self.incumbent.method = found, method
        self.budget.meter.has_plan |= self.has_fitting_plan
        latest = found.seconds * (1 + ESTIMATE_ERROR)
        contenders = [one for one in self.incumbent.contenders if not one.estimated or one.seconds <= latest]
        self.incumbent.contenders = [*(contenders if found.estimated else ()), found]
        return gain

    def settle_best(self) -> None:
        """Schedules the incumbent at full depth, then others for as long as they may be better."""
        while self.best is not None and self.best.estimated and not self.request.draft:
            exact, before = self.schedule_at_full_depth(self.best), self.best
            self.incumbent.contenders = [exact if one is before else one for one in self.incumbent.contenders]
            self.incumbent.plan = self.incumbent.contenders[0]
            for one in self.incumbent.contenders[1:]:
                self.incumbent.plan = one if one.better(self.best, self.limit) else self.best

    def finish(self) -> None:
        """Improves the order of the incumbent by local search, and leaves out slices of expansions."""
        assert self.best is not None
        self.incumbent.plan = expand_plan(self.improve_order(self.best), self.model.space.optimizer)

    def improve_order(self, found: ScheduledPlan, effort: int = FINAL_MOVES) -> ScheduledPlan:
        """A plan after local search with ``effort`` times the usual moves, if anything is left to gain."""
        late = self.interrupted or self.budget.meter.expired or (self.size.is_long and self.work_left <= 0)
        if self.request.draft or late or found.memory.peak > self.limit or self.open_gap <= self.request.gap:
            return found
        return improve_plan(found, self.model.space.optimizer, self.limit, self.budget, effort, keep_program_order=False)

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
        incumbent_seconds = self.best.placed_seconds if self.best is not None and self.has_fitting_plan else math.inf
        # solves for bounds are cheap, schedules are not
        tries = 0 if proves and self.is_folded and self.size.is_large else self.size.tries
        begun = 0 if proves and self.size.is_long else tries
        found = self.schedule(self.answers[-1], limits, begun, incumbent_seconds)
        if begun < tries and found.placed_seconds <= (1 + 2 * ESTIMATE_ERROR) * incumbent_seconds:
            found = self.schedule(self.answers[-1], limits, tries, incumbent_seconds)
        self.memory.is_short |= self.is_folded and found.memory.peak > self.limit
        self.has_gained = self.offer(found, solution.method)
        if solution.message == INTERRUPTED:
            raise KeyboardInterrupt
        if self.memory.repairs_by_crossover and found.memory.peak > self.limit:
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
            asked = self.memory.cover_rows.apply(problem)
            start = self.memory.cover_rows.complete(start) if start is not None else None

        def report(incumbent: float | None, bound: float, reached: float, seconds: float) -> None:
            if self.request.progress is not None:
                known = max(self.bound, bound * unit / (1 + TIES)) if proves and not self.is_folded else self.bound
                best = self.best.seconds if self.best is not None else math.inf
                self.request.progress(best, known, 1 - known / best if 0 < best < math.inf else 1.0, self.budget.meter.seconds)

        most = self.total_work
        if space.machine.overlaps or not proves:
            most *= SOLVE_SHARE if self.warm_start is not None else 0.5
        if self.is_folded and start is not None:
            start = self.model.restrict(start)

        def answer(problem: Problem) -> Solution:
            turn = self.budget.at_most(min(self.work_left, most)).at_least(LEAST_SOLVE_WORK)
            patient = self.size.is_small  # in larger problems other prices gain sooner
            found = solve_interruptibly(problem, turn, gap=gap, seed=self.request.seed, start=start, progress=report, patient=patient)
            if found.message == INTERRUPTED and found.choices is None:
                raise KeyboardInterrupt
            return found

        solution = self._known_solution(weights) if not proves and limit is None and asked is problem else None
        is_roomy = self.best is not None and self.best.memory.peak <= self.request.thresholds.roomy * self.limit
        if solution is None and self.memory.is_loose and asked.limit == self.limit and is_roomy:
            free = answer(replace(asked, limit=None))
            self.memory.is_loose = free.peak_usage is not None and free.peak_usage <= self.limit
            if free.message == INTERRUPTED and not self.memory.is_loose:
                raise KeyboardInterrupt
            solution = free if self.memory.is_loose else None
        self.last_solution = solution = answer(asked) if solution is None else solution
        if not proves and limit == UNLIMITED:
            self.free_solution = self.model, weights, solution
        if proves:
            self.claims.longest_solve = max(self.claims.longest_solve, self.budget.meter.spent - began)
            bound = solution.bound * unit / (1 + TIES)
            if bound > self.claims.bound:
                self.claims.bound, self.claims.weights = bound, weights
            if self.is_folded and solution.objective is not None and solution.choices is not None:
                self.claims.pending.append((bound, solution.objective * unit, weights, self.model.expand(solution.choices)))
            elif not self.is_folded:
                self.bound = max(self.bound, self.claims.bound)
        if asked is problem and limit is None:
            self.memory.is_infeasible = self.memory.is_infeasible or solution.status is Status.INFEASIBLE
        if solution.choices is None:
            return None
        self.warm_start = self.model.expand(solution.choices) if self.is_folded else solution.choices[: len(self.model.nodes)]
        self.answers.append(decode_assignment(self.model, self.warm_start))
        self.solutions.append((self.model, self.warm_start))
        return solution

    def _known_solution(self, weights: Weights) -> Solution | None:
        """The solution without a memory limit under the same weights, if it respects the limit."""
        if self.free_solution is None:
            return None
        model, known_weights, solution = self.free_solution
        fits = solution.peak_usage is not None and solution.peak_usage <= self.limit
        return solution if fits and model is self.model and known_weights == weights else None

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
        request = CrossoverRequest(
            self.limit, self.memory.recompute_times, self.size.tries, self.request.seed, budget.at_least(LEAST_SOLVE_WORK), shares,
            self.request.draft, self.request.thresholds,
        )  # fmt: skip
        folding = model.folding if isinstance(model, TiedModel) else None
        found, prices = solve_restricted(model.space, plans, prices, request, folding, best)
        if found is None or found.memory.peak > self.limit:
            return None, prices
        self.has_gained |= self.offer(found, "auto")
        return found, prices

    def recombine_one(self, plan: ScheduledPlan, prices: LearnedOverlap) -> ScheduledPlan | None:
        """Crossover of one plan: its strategies with less kept, if that fits."""
        return self.recombine((plan.assignment,), prices, self.budget.at_most(min(self.work_left, self.total_work * SOLVE_SHARE)))[0]

    def schedule(self, assignment: Assignment, start: Limits | None, tries: int, incumbent_seconds: float = math.inf) -> ScheduledPlan:
        """The best schedule of an assignment in a few tries. Of a deep graph it is extrapolated, unless memory is near the limit."""
        found = self._schedule(assignment, False, start, tries, incumbent_seconds, CLOSE_GAP)
        return self.schedule_at_full_depth(found) if self._is_near_limit(found) else found

    def _is_near_limit(self, found: ScheduledPlan) -> bool:
        """Whether memory is so near the limit that an extrapolated schedule does not show whether it fits."""
        return found.estimated and not self.request.draft and abs(found.memory.peak - self.limit) < NEAR * self.limit

    def confirm(self, found: ScheduledPlan) -> ScheduledPlan:
        """The plan scheduled at full depth, if it may be the best."""
        hopeful = replace(found, seconds=found.seconds * (1 - NEAR))
        may_be_best = found.estimated and not self.request.draft and hopeful.better(self.best, self.limit)
        return self.schedule_at_full_depth(found) if may_be_best else found

    def schedule_at_full_depth(self, found: ScheduledPlan) -> ScheduledPlan:
        """The plan scheduled at full depth, under its own limits."""
        return self._schedule(found.assignment, True, found.limits, tries=0)

    def _schedule(
        self, assignment: Assignment, exact: bool, start: Limits | None, tries: int, incumbent_seconds: float = math.inf, gain: float = 0.0
    ) -> ScheduledPlan:  # fmt: skip
        """Tries limits for an assignment. The limits that were tried for it before count."""
        known = next((search for depth, search in self.limit_searches if depth == exact and search.assignment == assignment), None)
        if known is None:
            model, space, graph = self.model, self.model.space, self.model.planned_graph
            samples = (() if exact else model.short_samples(assignment)) or (Sample(1.0, graph, model.unfold(assignment)),)
            known = LimitSearch(assignment, samples, space.machine, space.optimizer, self.limit, budget=self.budget)
            self.limit_searches.append((exact, known))
        return known.run(start, tries, incumbent_seconds, gain, improve=not self.size.is_long)
